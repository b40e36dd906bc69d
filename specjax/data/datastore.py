"""Datastores: texts for looking up the next tokens. Host side: build, save, load.

A store is one flat array of documents, each followed by -1, and its suffix array: all positions of
the store, sorted by the ``reach`` tokens that begin there. So all occurrences of a phrase are
neighbours, and two binary searches find them (``specjax.drafters.lookup._match``). No phrase
contains a -1, so no match crosses documents.

The array is sorted with NumPy, by prefix doubling (Manber and Myers 1993): log2(reach) stable sorts
of n integers. The library pydivsufsort (MIT, maintained, with wheels) was considered: it sorts
bytes, so a text of token ids is four times longer, and it compares to the end of every repetition.
The store only needs 32 tokens, ties by position, and no compiled dependency.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.data import array_files, jsonl, recordings
from specjax.errors import UserError
from specjax.types import LM

NAME, SCHEMA = "datastore", 1
BUILD = "--config=configs/datastore.py and this target"
REACH, LONGEST = 32, 4096
SEPARATOR = -1


class Store(NamedTuple):
    """Texts and their suffix array."""

    tokens: np.ndarray  # i32[n], -1 after every document
    # i32[n]: the positions 0..n-1, sorted by the ``reach`` tokens that begin there; -1 sorts first.
    order: np.ndarray
    reach: int = REACH


def build(documents: Sequence[Sequence[int]], reach: int = REACH) -> Store:
    """The store of some documents; empty ones are left out.

    Takes O(n log n log reach) time, and about 50 bytes per token during the sort.

    Args:
        documents: token ids >= 0.
        reach: number of tokens that the order compares: no longer phrase can be looked up.

    Raises:
        UserError: no tokens at all, negative ids, a reach below 1.
    """
    if not 0 < reach <= LONGEST:
        raise UserError(f"reach is {reach}; it must be in 1..{LONGEST}")
    tokens = flatten(documents)
    if not len(tokens):
        raise UserError("the documents hold no token; a datastore needs text")
    return Store(tokens, suffix_array(tokens, reach), reach)


def recent(documents: Sequence[Sequence[int] | np.ndarray], capacity: int) -> np.ndarray:
    """i32[capacity]: the last documents that fit, each followed by -1; padded with -1.

    Whole documents are dropped, the oldest first. If the last document is longer than
    ``capacity - 1`` tokens, its end is kept.
    """
    kept, room = [], capacity
    for document in reversed([_ids(d) for d in documents]):
        if not len(document):
            continue
        if not kept:
            document = document[-(capacity - 1) :]
        if len(document) + 1 > room:
            break
        room -= len(document) + 1
        kept.append(document)
    tokens = np.full(capacity, SEPARATOR, np.int32)
    text = flatten(kept[::-1])
    tokens[: len(text)] = text
    return tokens


def save(
    directory: str | os.PathLike,
    store: Store,
    *,
    vocab_size: int,
    vocabulary: str | None,
    sources: Sequence[str] = (),
) -> None:
    """Writes datastore.safetensors and datastore.json. Raises UserError.

    ``vocabulary`` is ``LM.vocabulary``, the tokenizer's fingerprint; ``sources`` name the texts.
    """
    facts = {
        "vocabulary": vocabulary,
        "vocab_size": vocab_size,
        "tokens": int((store.tokens >= 0).sum()),
        "documents": len(split(store.tokens)),
        "reach": store.reach,
        "sources": list(sources),
    }
    arrays = {"tokens": store.tokens, "order": store.order}
    array_files.write(directory, NAME, SCHEMA, arrays, facts)


def load(directory: str | os.PathLike, target: LM) -> Store:
    """Reads the store in ``directory``, or makes one of a recording (a .jsonl file).

    The documents of a recording are its conversations, prompt and output: the end of a prompt finds
    the answer that an earlier run gave to it. A recording has no fingerprint of its tokenizer, so
    only the size of the vocabulary is checked.

    Raises UserError if there is none, it is damaged, or it was built with another tokenizer.
    """
    if jsonl.plain_suffix(Path(directory)) == ".jsonl":
        texts = recordings.read(directory, target.vocab_size, where="drafter.datastore")
        return build([text.prompt + text.output for text in texts.traces])
    arrays, manifest = array_files.read(directory, NAME, SCHEMA, target, BUILD)
    reach = manifest.get("reach")
    whole = isinstance(reach, int) and not isinstance(reach, bool) and 0 < reach <= LONGEST
    if set(arrays) != {"tokens", "order"} or not whole:
        raise UserError(f"{directory} has no datastore of specjax; build one with {BUILD}")
    store = Store(arrays["tokens"], arrays["order"], manifest["reach"])
    check(store, target)
    return store


def check(store: Store, target: LM) -> None:
    """Raises UserError if the store has ids outside the target's vocabulary."""
    if (top := store.tokens.max(initial=-1)) >= target.vocab_size:
        raise UserError(
            f"the datastore has the token id {top} and the target {target.vocab_size} tokens; "
            f"it was built with another tokenizer than the target's, build it again with {BUILD}"
        )


def split(tokens: np.ndarray) -> list[np.ndarray]:
    """The documents in a flat array, without separators and padding."""
    ends = np.flatnonzero(tokens < 0)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    return [tokens[a:b] for a, b in zip(starts, ends, strict=True) if b > a]


def flatten(documents: Sequence[Sequence[int]]) -> np.ndarray:
    """i32[n]: the documents that are not empty, each followed by -1.

    Raises UserError unless they are lists of ids >= 0.
    """
    parts = [ids for document in documents if len(ids := _ids(document))]
    if not parts:
        return np.zeros(0, np.int32)
    return np.concatenate([np.append(ids, np.int32(SEPARATOR)) for ids in parts])


def _ids(document: Sequence[int] | np.ndarray) -> np.ndarray:
    ids = np.asarray(document)
    if ids.size and (ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0):
        raise UserError("a document is not a list of token ids >= 0; give lists of such ids")
    return ids.astype(np.int32).reshape(-1)


def suffix_array(tokens: np.ndarray, reach: int) -> np.ndarray:
    """i32[n]: the positions of tokens i32[n], sorted by the ``reach`` tokens that begin there.

    Tokens past the end count as -1. Ties are sorted by position.
    """
    size, known = len(tokens), 1
    rank = tokens.astype(np.int64) + 1
    order = np.argsort(rank, kind="stable")
    while known < reach:
        # ``rank`` compares ``known`` tokens. The rank at the position ``step`` further adds
        # ``step`` more tokens to the comparison.
        step = min(known, reach - known)
        rank = _dense(rank, order)
        if rank[order[-1]] == size - 1:  # all ranks differ: the order is final
            break
        # The -1 at the end of the store sorts first and has rank 0; so do tokens past the end.
        following = np.zeros(size, np.int64)
        following[: max(size - step, 0)] = rank[step:]
        rank = rank * size + following
        order = np.argsort(rank, kind="stable")
        known += step
    return order.astype(np.int32)


def _dense(rank: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The ranks renumbered as 0, 1, 2, ..., in the same order."""
    new = np.empty_like(rank)
    new[order] = np.concatenate([[0], np.cumsum(np.diff(rank[order]) > 0)])
    return new
