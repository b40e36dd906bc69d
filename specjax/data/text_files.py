"""Reads plain text to train on: local .txt and .jsonl files, a TFDS dataset, the embedded corpus.

Local files may be compressed (``.txt.gz``, ``.jsonl.xz``).
``corpora`` holds the datasets; ``token_streams`` makes tokens and batches from the texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from specjax.data import jsonl
from specjax.data.corpora import Text, load_texts, load_tfds
from specjax.errors import UserError
from specjax.files import buckets

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Where plain text comes from: ``files``, else ``tfds``, else the embedded corpus."""

    files: tuple[str, ...] = ()  # .txt and .jsonl files
    tfds: str = ""  # name or directory of a TFDS dataset
    # Where datasets are stored. Empty: ``<workdir>/data`` for the embedded corpus, TFDS's own
    # folder for other datasets.
    dir: str = ""
    text_key: str = "text"  # feature of the TFDS dataset that holds the text


def load(source: TextSource, workdir: str | Path, split: str) -> list[Text]:
    """(origin, text) of a split: "train", "valid", "test", or "all" of files. Raises UserError."""
    if source.files:
        return load_files(source.files, split)
    if source.tfds:
        return load_tfds(source.tfds, source.dir, split, source.text_key)
    return load_texts(folder(source, workdir), split)


def folder(source: TextSource, workdir: str | Path) -> Path:
    """The folder for datasets and token streams: ``source.dir``, or ``<workdir>/data``."""
    if buckets.is_address(source.dir):
        raise UserError(f"config.data.dir: {source.dir} is in a bucket; name a local folder")
    return Path(source.dir).expanduser() if source.dir else Path(workdir) / "data"


def names(source: TextSource) -> list[str]:
    """The names of what ``load`` reads, for manifests."""
    return list(source.files) or [f"tfds:{source.tfds}" if source.tfds else "embedded corpus"]


def split_names(text: str) -> tuple[str, ...]:
    """The file names in ``text``, where commas separate them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def load_files(files: str | Sequence[str], split: str) -> list[Text]:
    """(path, text) of ``split`` of local .txt files and .jsonl files with a "text" key.

    The files keep their order. The last 5 % of each file's characters are "valid", the 5 % before
    them "test", the rest "train"; a cut is at the start of a line (in a .jsonl file of a record).
    Raises UserError for a file that is missing, empty, malformed or not UTF-8.
    """
    texts: list[Text] = []
    for name in [files] if isinstance(files, str) else files:
        path = Path(name)
        chosen = part_of(pieces(buckets.local(name)), split, len)
        if jsonl.plain_suffix(path) != ".jsonl":
            chosen = ["".join(chosen)]
        texts += [(str(path), text) for text in chosen if text]
    return texts


def pieces(path: Path) -> list[str]:
    """The smallest parts that stay whole: lines of a .txt file, texts of a .jsonl file.

    Raises UserError for a file that is missing, empty, malformed or not UTF-8.
    """
    where = f"data file {path}"
    text = jsonl.read(path, where, compressed=True)
    if not text.strip():
        raise UserError(f"{where} is empty; give a file with text")
    if jsonl.plain_suffix(path) != ".jsonl":
        return text.splitlines(keepends=True)
    objects = jsonl.objects(text, where)
    return [line.check("texts", {"text": "text"})["text"] for line in objects]


def part_of(items: list[Item], split: str, size: Callable[[Item], int]) -> list[Item]:
    """The items of a split: 90 % of their sizes are "train", then 5 % "test", then 5 % "valid".

    "all" are the items of every split.
    """
    starts = np.cumsum([0, *map(size, items)])
    test, valid = (int(n) for n in np.searchsorted(starts, [starts[-1] * 0.90, starts[-1] * 0.95]))
    parts = {"train": items[:test], "test": items[test:valid], "valid": items[valid:], "all": items}
    return parts[split]
