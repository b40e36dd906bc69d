"""From text to batches: what a config's ``data`` group names, the tokenizer, token streams, crops and prompts.

Datasets are in ``corpora``; documents that keep their borders and masks are packed in ``packing``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax.config import Config
from specjax.data import jsonl
from specjax.data.corpora import Text, load_texts, load_tfds
from specjax.errors import UserError
from specjax.types import Batch

SEPARATOR = "<|endoftext|>"  # id 0 of our tokenizers: starts every document, ends it, and pads
_TOKENIZER_BYTES = 4_000_000  # merges hardly change beyond this, and training them is linear in it
_WORTH_A_FILE = 100_000  # fewer tokens are made again in no time


# --- where text comes from -------------------------------------------------------------------------------------------


def load(source: Config, workdir: str | Path, split: str) -> list[Text]:
    """(where, text) of ``split`` ("train", "valid", "test") of what a config's ``data`` group names.

    ``source.files`` (.txt and .jsonl, separated by commas), or ``source.tfds`` (see ``load_tfds``, with ``source.text_key``),
    or else the embedded corpus. ``source.dir`` is where datasets are kept; empty: ``<workdir>/data`` for the embedded
    corpus, TFDS's own folder for others. Raises UserError.
    """
    files, tfds_name = file_names(source), source.get("tfds", "")
    if files and tfds_name:
        raise UserError(
            "config.data.files and config.data.tfds are both given; leave one of them empty"
        )
    if files:
        return load_files(files, split)
    if tfds_name:
        return load_tfds(tfds_name, source.dir, split, source.get("text_key", "text"))
    return load_texts(
        Path(source.dir).expanduser() if source.dir else Path(workdir) / "data", split
    )


def sources(source: Config) -> list[str]:
    """The names of what ``load`` reads, for manifests."""
    return file_names(source) or [
        f"tfds:{source.tfds}" if source.get("tfds") else "embedded corpus"
    ]


def file_names(source: Config) -> list[str]:
    """``source.files``, which are separated by commas."""
    return [name.strip() for name in source.files.split(",") if name.strip()]


def load_files(files: str | Sequence[str], split: str) -> list[Text]:
    """(path, text) of ``split`` of local .txt files and .jsonl files with a "text" key, in the order given.

    The last 5 % of each file's characters are "valid", the 5 % before them "test", the rest "train", cut where a line
    (in a .jsonl file a record) begins. Raises ``UserError`` for a file that is missing, empty, malformed or not UTF-8.
    """
    texts: list[Text] = []
    for path in map(Path, [files] if isinstance(files, str) else files):
        pieces = _pieces(path)
        chosen = pieces[share([len(piece) for piece in pieces], split)]
        if path.suffix != ".jsonl":
            chosen = ["".join(chosen)]
        texts += [(str(path), text) for text in chosen if text]
    return texts


def share(sizes: Sequence[int], split: str) -> slice:
    """Which of the pieces of these sizes are in ``split``: 90 % "train", then 5 % "test", the last 5 % "valid"."""
    starts = np.cumsum([0, *sizes])
    test, valid = (int(n) for n in np.searchsorted(starts, [starts[-1] * 0.90, starts[-1] * 0.95]))
    return {"train": slice(0, test), "test": slice(test, valid), "valid": slice(valid, len(sizes))}[
        split
    ]


def _pieces(path: Path) -> list[str]:
    """What may not be cut in two: the lines of a .txt file, the texts of a .jsonl file."""
    where = f"data file {path}"
    text = jsonl.read(path, where)
    if not text.strip():
        raise UserError(f"{where} is empty; give a file with text")
    if path.suffix != ".jsonl":
        return text.splitlines(keepends=True)
    return [each["text"] for each in jsonl.objects(text, "text", where)]


# --- tokens ----------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly one special token, ``<|endoftext|>`` (id 0); the same texts give the same one.

    Longer corpora are sampled by taking every n-th text. Raises ``UserError`` when ``vocab_size`` cannot hold the bytes.
    """
    if vocab_size < 257:
        raise UserError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {SEPARATOR} need at least 257"
        )
    texts = list(texts)
    stride = -(-sum(map(len, texts)) // _TOKENIZER_BYTES) or 1
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[::stride], trainer)
    return tokenizer


def separator_id(tokenizer: Tokenizer) -> int | None:
    """The id that starts a document: ours, else the usual names of other tokenizers, else none."""
    known = (
        tokenizer.token_to_id(name)
        for name in (SEPARATOR, "<s>", "<|begin_of_text|>", "<bos>", "</s>")
    )
    return next((token for token in known if token is not None), None)


def tokenise(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """i32[n]: one flat stream, each document preceded by the separator."""
    start = separator_id(tokenizer)
    head = [] if start is None else [start]
    # "fast" leaves out the offsets, which nobody wants here: four times quicker.
    parts = [
        head + encoding.ids
        for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    ]
    return (
        np.concatenate([np.asarray(part, np.int32) for part in parts])
        if parts
        else np.zeros(0, np.int32)
    )


def cached_tokens(tokenizer: Tokenizer, texts: Sequence[str], folder: str | Path) -> np.ndarray:
    """``tokenise``, remembered in ``folder`` under a name that holds the tokenizer's and the texts' hash."""
    digest = hashlib.sha256(tokenizer.to_str().encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    path = Path(folder) / f"tokens-{digest.hexdigest()[:16]}.npy"
    if path.exists():
        return np.load(path)
    tokens = tokenise(tokenizer, texts)
    if len(tokens) < _WORTH_A_FILE:
        return tokens
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with open(partial, "wb") as file:
        np.save(file, tokens)
    os.replace(partial, path)
    return tokens


@dataclasses.dataclass(frozen=True)
class Batches:
    """Random crops of a token stream. A batch is a pure function of (seed, step): a resumed run sees the same data."""

    tokens: np.ndarray  # i32[n]
    batch_size: int
    length: int  # T; a crop holds one token more, so that every position has its label
    seed: int = 0

    def __post_init__(self):
        _check_size(self.tokens, self.length)

    def batch(self, step: int) -> Batch:
        """The batch of a step: tokens i32[B,T+1] (NumPy), every one of them a label, a row one document."""
        random = np.random.default_rng([self.seed, step])
        return _crops(
            self.tokens,
            random.integers(0, len(self.tokens) - self.length, self.batch_size),
            self.length,
        )


def held_out_batches(tokens: np.ndarray, batch_size: int, length: int, count: int) -> list[Batch]:
    """``count`` batches of tokens i32[B,T+1] of evenly spaced crops, always the same; fewer where that would read
    anything twice."""
    _check_size(tokens, length)
    count = max(1, min(count, len(tokens) // (batch_size * (length + 1))))
    starts = np.linspace(0, len(tokens) - length - 1, count * batch_size).astype(np.int64)
    return [_crops(tokens, part, length) for part in starts.reshape(count, batch_size)]


def held_out_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, count: int, length: int, seed: int = 0
) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids, each from the start of a line of one of ``texts`` (give the test split).

    Lines are drawn uniformly and without replacement. Raises ``UserError`` when there are not enough of them.
    """
    lines = [
        (index, match.start())
        for index, text in enumerate(texts)
        for match in re.finditer(r"(?m)^.*\S", text)
    ]
    prompts: list[list[int]] = []
    for pick in np.random.default_rng([seed, count, length]).permutation(len(lines)):
        index, start = lines[int(pick)]
        # Sixteen characters a token are plenty: no need to tokenise the rest of the file.
        text = texts[index][start : start + 16 * length]
        if len(text.encode()) <= length:  # a token is at least a byte
            continue
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > length:  # strictly: the last token of a cut text may be half a word
            prompts.append(ids[:length])
        if len(prompts) == count:
            return prompts
    raise UserError(
        f"only {len(prompts)} lines begin prompts of {length} tokens, {count} wanted; give more or longer text"
    )


def _crops(tokens: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    crops: Any = np.ascontiguousarray(
        tokens[starts[:, None] + np.arange(length + 1)]
    )  # the loop places them on devices
    return Batch(crops)


def _check_size(tokens: np.ndarray, length: int) -> None:
    if len(tokens) <= length:
        raise UserError(
            f"the corpus has {len(tokens)} tokens, fewer than one crop of {length + 1}; give more text or a shorter length"
        )
