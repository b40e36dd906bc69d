"""What is counted rather than trained: datastores (``rest``) and n-gram tables (``ngram_lm``), from text or from the target.

A finished build is left alone by the command that made it, as a training run is; the manifest appears last.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from specjax.config import Config
from specjax.data import datastore, ngram_tables, token_streams
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.hf_config import config_from_hf
from specjax.train.checkpoint import check_same
from specjax.train.writer import Meter, make_writer, row_keys, write

OBJECTIVES = {
    "datastore": datastore.NAME,
    "ngram": ngram_tables.NAME,
}  # the name of the files that it writes


class Words(NamedTuple):
    """A model's tokenizer, without the model."""

    tokenizer: Tokenizer
    vocab_size: int
    vocabulary: str  # its fingerprint, as in ``LM.vocabulary``
    special: int | None  # the token that starts a document


def run(config: Config, workdir: str | Path) -> dict:
    """Builds what ``config`` describes into ``workdir`` and gives its summary; returns at once if that is done.

    Writes config.json and summary.json, then the arrays and their manifest. Raises UserError.
    """
    began = time.monotonic()
    workdir, resolved = Path(workdir).expanduser(), json.loads(config.to_json())
    if any((workdir / other).exists() for other in ("model", "checkpoints")):
        raise UserError(
            f"{workdir} holds a training run, which this would overwrite; choose another --workdir"
        )
    for other in OBJECTIVES.values():
        if (workdir / f"{other}.json").exists():
            if not all((workdir / file).exists() for file in ("config.json", "summary.json")):
                raise UserError(
                    f"{workdir} holds a {other} that this command did not make; choose another --workdir"
                )
            check_same(json.loads((workdir / "config.json").read_text()), resolved, workdir)
            return json.loads((workdir / "summary.json").read_text())
    _check(config)
    words = read_words(config.target)
    facts, save = (_datastore if config.objective == "datastore" else _ngram)(
        config, workdir, words
    )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        summary = facts | {"seconds": time.monotonic() - began}
        for file, value in (("config.json", resolved), ("summary.json", summary)):
            (workdir / file).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write into {workdir}: {error.strerror}; choose another --workdir"
        ) from None
    save(workdir)  # the manifest comes last: without it, the next run begins anew
    return summary


def _datastore(config: Config, workdir: Path, words: Words) -> tuple[dict, Callable[[Path], None]]:
    """What the store holds, and how to save it."""
    with _Busy("reading and tokenising") as say:
        documents = tokenise(words, _texts(config, workdir))
        say("sorting")
        store = datastore.build(documents, config.reach)
    names = {
        "vocab_size": words.vocab_size,
        "vocabulary": words.vocabulary,
        "sources": _sources(config),
    }
    facts = {"tokens": sum(map(len, documents)), "documents": len(documents)}
    return facts, functools.partial(datastore.save, store=store, **names)


def _ngram(config: Config, workdir: Path, words: Words) -> tuple[dict, Callable[[Path], None]]:
    """What the tables hold, and how to save them."""
    with _Busy("reading and tokenising"):
        documents = tokenise(words, _texts(config, workdir))
    if config.from_target:
        documents = from_target(config, words, documents)
    with _Busy("counting"):
        keys = {key: config[key] for key in ("successors", "contexts", "smoothing")}
        tables = ngram_tables.count(documents, words.vocab_size, **keys)
    facts = {"tokens": sum(map(len, documents)), "contexts": len(tables.trigram_ids)}
    sources = [
        f"the target, after {name}" if config.from_target else name for name in _sources(config)
    ]
    return facts, functools.partial(
        ngram_tables.save, tables=tables, vocabulary=words.vocabulary, sources=sources
    )


def _check(config: Config) -> None:
    """Finds what is wrong with the numbers before anything is read."""
    least = (
        {"reach": 1}
        if config.objective == "datastore"
        else {"successors": 1, "contexts": 1, "from_target": 0}
    )
    for name, smallest in least.items():
        if config[name] < smallest:
            raise UserError(f"config.{name} is {config[name]}; it must be at least {smallest}")
    if config.objective == "ngram":
        if not 0 < config.smoothing < float("inf"):
            raise UserError(
                f"config.smoothing is {config.smoothing:g}; it must be a number above 0"
            )
        for name, value in config.generation.items():
            if value < 1:
                raise UserError(f"config.generation.{name} is {value}; it must be at least 1")
    if not config.target:
        raise UserError(
            "config.target is empty; give the model directory whose tokenizer is to be used"
        )


def read_words(directory: str | Path) -> Words:
    """The tokenizer of a model directory; its weights are not read. Raises UserError."""
    path = hf.resolve(directory)
    size = config_from_hf(hf._read_json(path / "config.json")).vocab_size
    tokenizer = hf.load_tokenizer(path, size)
    if tokenizer is None:
        raise UserError(f"{path} has no tokenizer.json; the text cannot be tokenised without")
    return Words(tokenizer, size, hf.fingerprint(tokenizer), token_streams.separator_id(tokenizer))


def tokenise(words: Words, texts: Sequence[str]) -> list[list[int]]:
    """Each text as ids, its first the token that starts a document: what a model reads before it."""
    head = [] if words.special is None else [words.special]
    return [
        head + e.ids
        for e in words.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        if e.ids
    ]


def _sources(config: Config) -> list[str]:
    """Where the text comes from, for the manifest."""
    return _files(config) or ["embedded corpus, train split"]


def _files(config: Config) -> list[str]:
    return [name.strip() for name in config.data.files.split(",") if name.strip()]


def _texts(config: Config, workdir: Path) -> list[str]:
    """Whole files (nothing is held out: whoever measures takes other text), or the train split of the embedded corpus."""
    files = [Path(name).expanduser() for name in _files(config)]
    if not files:
        folder = Path(config.data.dir).expanduser() if config.data.dir else workdir / "data"
        return [text for _, text in token_streams.load_texts(folder, "train")]
    texts = []
    for path in files:
        pieces = token_streams._pieces(path)
        texts += pieces if path.suffix == ".jsonl" else ["".join(pieces)]
    return texts


def from_target(
    config: Config, words: Words, documents: Sequence[Sequence[int]]
) -> list[list[int]]:
    """About ``config.from_target`` tokens that the target itself writes at temperature 1, begun by pieces of ``documents``.

    ``config.generation`` holds the batch size and the lengths of prompt and continuation. What is returned begins with the
    last two tokens of the prompt: the context of the first that is new. Raises UserError.
    """
    target, sizes = hf.load(config.target), config.generation
    # Where the tokenizer puts a token before every prompt, the model knows no text without it.
    head = [words.special] if words.special in words.tokenizer.encode("").ids else []
    length, new, batch = sizes.prompt_tokens, sizes.new_tokens, sizes.batch_size
    if len(head) + length + new > target.config.max_positions:
        raise UserError(
            f"config.generation asks for {length} + {new} tokens and the model has {target.config.max_positions} "
            "positions; lower one of them"
        )
    long = [ids for ids in documents if len(ids) >= length]
    if not long:
        raise UserError(
            f"no text has the {length} tokens of config.generation.prompt_tokens; lower it, or give more text"
        )
    weights = np.array([len(ids) for ids in long]) / sum(map(len, long))
    # At temperature 1 and in large batches, drafts cost more than they bring.
    author, wanted, written, count, number = (
        make_writer(target, {"name": "none"}),
        config.from_target,
        [],
        0,
        0,
    )
    with Meter("the target writes", wanted) as meter:
        while count < wanted:
            random = np.random.default_rng([config.seed, number])
            prompts = []
            for which in random.choice(len(long), batch, p=weights):
                start = random.integers(0, len(long[which]) - length + 1)
                prompts.append(head + long[which][start : start + length])
            keys = row_keys(config.seed, range(number * batch, (number + 1) * batch))
            rows, rounds = write(author, prompts, keys, {"temperature": 1.0}, new, batch)
            written += [prompt[-2:] + row for prompt, row in zip(prompts, rows, strict=True)]
            done = sum(map(len, rows))
            count, number = count + done, number + 1
            meter.add(done, done, sum(rounds))
            if not done:
                raise UserError(
                    "the target ends every text at once; give it other text to begin with"
                )
    return written


class _Busy:
    """A line on the terminal while something takes its time; nothing where there is no terminal."""

    def __init__(self, what: str):
        self._status = Console(stderr=True).status(what) if sys.stderr.isatty() else None

    def __enter__(self) -> Callable[[str], None]:
        if self._status:
            self._status.start()
        return self._status.update if self._status else lambda what: None

    def __exit__(self, *_) -> None:
        if self._status:
            self._status.stop()
