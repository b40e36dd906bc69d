"""Objectives datastore and ngram: tables that are counted from text, for ``rest`` and ``ngram_lm``.

The text is a corpus, or (n-gram tables) what the target writes. A finished build is left unchanged;
its manifest is written last.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from specjax import drafters
from specjax.config import Config
from specjax.data import datastore, ngram_tables, text_files, token_streams
from specjax.errors import UserError
from specjax.models import hf, hf_config
from specjax.train.display import Meter
from specjax.train.recipes import common
from specjax.train.writer import make_writer, row_keys, write

# Objective -> the name of the files that it writes.
OBJECTIVES = {"datastore": datastore.NAME, "ngram": ngram_tables.NAME}


class Vocabulary(NamedTuple):
    """A model's tokenizer, without the model."""

    tokenizer: Tokenizer
    size: int
    fingerprint: str  # as in ``LM.vocabulary``


def run(config: Config, workdir: Path) -> dict:
    """Builds the tables into ``workdir``; returns their summary. A finished build is not changed.

    Writes config.json and summary.json, then the arrays and their manifest. Raises UserError.
    """
    manifests = [workdir / f"{name}.json" for name in OBJECTIVES.values()]
    built = next((path for path in manifests if path.exists()), manifests[0])
    return common.write_data(config, workdir, built, _prepare)


def _prepare(config: Config, workdir: Path) -> common.Data:
    began = time.monotonic()
    vocabulary = read_vocabulary(config.target)
    files = text_files.split_names(config.data.files)
    with Console(stderr=True).status("reading and tokenising"):
        # No part of a file is held out: measure on other text.
        source = text_files.TextSource(files, dir=config.data.dir)
        texts = text_files.load(source, workdir, "all" if files else "train")
        documents = tokenise(vocabulary, [text for _, text in texts])
    # The names of the texts, for the manifest.
    sources = list(files) or ["embedded corpus, train split"]
    if config.objective == "datastore":
        with Console(stderr=True).status("sorting"):
            store = datastore.build(documents, config.reach)
        size = {"documents": len(documents)}
        save = functools.partial(datastore.save, store=store, vocab_size=vocabulary.size)
    else:
        if config.from_target:
            documents = from_target(config, vocabulary, documents)
            sources = [f"the target, after {name}" for name in sources]
        with Console(stderr=True).status("counting"):
            keys = {key: config[key] for key in ("successors", "contexts", "smoothing")}
            tables = ngram_tables.count(documents, vocabulary.size, **keys)
        size = {"contexts": len(tables.trigram_ids)}
        save = functools.partial(ngram_tables.save, tables=tables)
    facts = {"tokens": sum(map(len, documents))} | size
    save = functools.partial(save, vocabulary=vocabulary.fingerprint, sources=sources)
    # The manifest is last: without it, the next run starts again.
    return common.Data(lambda _: (facts | {"seconds": time.monotonic() - began}, {}), None, save)


def read_vocabulary(directory: str | Path) -> Vocabulary:
    """The tokenizer of a model directory; its weights are not read. Raises UserError."""
    path = hf.resolve(directory, weights=False)
    size = hf_config.config_from_hf(hf.read_config(path)).vocab_size
    tokenizer = hf.load_tokenizer(path, size)
    if tokenizer is None:
        raise UserError(f"{path} has no tokenizer.json; text needs a tokenizer")
    return Vocabulary(tokenizer, size, hf.fingerprint(tokenizer))


def tokenise(vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
    """Each text that has tokens as ids, after the token that starts a document."""
    head, *every = token_streams.documents(vocabulary.tokenizer, ["", *texts])
    return [ids for ids in every if ids != head]


def from_target(
    config: Config, vocabulary: Vocabulary, documents: Sequence[Sequence[int]]
) -> list[list[int]]:
    """About ``config.from_target`` tokens that the target writes at temperature 1.

    It continues pieces of ``documents``; ``config.generation`` holds the batch size and the lengths
    of prompt and continuation. Each result starts with the last two tokens of the prompt, which are
    the context of the first new token. Raises UserError.
    """
    target, sizes = hf.load(config.target), config.generation
    if target.lm.encoder is not None:
        raise UserError(
            f"{target.directory} is an encoder-decoder model, which continues no text; leave "
            "config.from_target 0, or take a decoder"
        )
    length, batch = sizes.prompt_tokens, sizes.batch_size
    head = token_streams.opening(vocabulary.tokenizer)
    common.check_room(config, len(head), target.config.longest_text)
    long = [ids for ids in documents if len(ids) >= length]
    if not long:
        raise UserError(
            f"no text has the {length} tokens of config.generation.prompt_tokens; "
            "lower it, or give more text"
        )
    weights = np.array([len(ids) for ids in long]) / sum(map(len, long))
    # At temperature 1 and in large batches, drafts cost more than they save.
    writer, settings = make_writer(target, {"name": drafters.PLAIN}), {"temperature": 1.0}
    results: list[list[int]] = []
    count = number = 0
    with Meter("the target writes", config.from_target) as meter:
        while count < config.from_target:
            random = np.random.default_rng([config.seed, number])
            prompts = []
            for document in random.choice(len(long), batch, p=weights):
                start = random.integers(0, len(long[document]) - length + 1)
                prompts.append(head + long[document][start : start + length])
            keys = row_keys(config.seed, range(number * batch, (number + 1) * batch))
            rows, rounds = write(writer, prompts, keys, settings, sizes.new_tokens, batch)
            results += [prompt[-2:] + row for prompt, row in zip(prompts, rows, strict=True)]
            written = sum(map(len, rows))
            count, number = count + written, number + 1
            meter.add(written, written, sum(rounds))
            if not written:
                raise UserError(
                    "the target ends every text at once; give it other text to continue"
                )
    return results
