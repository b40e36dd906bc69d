"""Datastores: texts in which the next tokens can be looked up. Host side: build, append, save, load.

A store is one flat array of documents, each followed by -1, and the suffix array of it: every place of the store, sorted by
the ``reach`` tokens that begin there. All occurrences of a phrase then are neighbours, and two binary searches find them
(``specjax.drafters._suffix_array``). No phrase holds a -1, so nothing matches across documents.

The array is sorted with numpy, by prefix doubling (Manber and Myers 1993): log2(reach) stable sorts of n integers. A library
was considered: pydivsufsort (MIT, wheels, maintained) binds an algorithm on bytes, which for token ids sorts a text four
times as long and to the end of every repetition. The store needs 32 tokens, ties in order, and no compiled dependency.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.data import array_files
from specjax.errors import UserError
from specjax.types import LM

NAME, SCHEMA = "datastore", 1
BUILD = "--config=configs/datastore.py and this target"
REACH, LONGEST = 32, 4096
SEPARATOR = -1


class Store(NamedTuple):
    """Texts and their suffix array."""

    tokens: np.ndarray  # i32[n], -1 after every document
    order: (
        np.ndarray
    )  # i32[n] the places 0..n-1, sorted by the ``reach`` tokens that begin there; -1 first
    reach: int = REACH


def build(documents: Sequence[Sequence[int]], reach: int = REACH) -> Store:
    """The store of token lists; empty ones are left out. O(n log n log reach) time, about 50 bytes a token while it sorts.

    Args:
        documents: token ids >= 0.
        reach: how many tokens the order looks at: no longer phrase can be looked up.

    Raises:
        UserError: no tokens at all, negative ids, a reach below 1.
    """
    if not 0 < reach <= LONGEST:
        raise UserError(f"reach is {reach}; it must be in 1..{LONGEST}")
    tokens = flatten(documents)
    if not len(tokens):
        raise UserError("the documents hold no token; a datastore needs text")
    return Store(tokens, suffix_array(tokens, reach), reach)


def empty(capacity: int, reach: int = REACH) -> Store:
    """A store of ``capacity`` places without any text: something to ``append`` to."""
    if capacity < 2 or reach < 1:
        raise UserError(f"capacity is {capacity} and reach {reach}; they must be at least 2 and 1")
    return Store(np.full(capacity, SEPARATOR, np.int32), np.arange(capacity, dtype=np.int32), reach)


def append(store: Store, documents: Sequence[Sequence[int]], capacity: int) -> Store:
    """The store with further documents, in exactly ``capacity`` places: the oldest documents go, whole, and -1 fills up.

    Of a document that alone is longer than ``capacity - 1`` tokens the end is kept. Shapes stay, so nothing is compiled
    again.
    """
    empty(capacity, store.reach)  # checks
    tokens = recent([*split(store.tokens), *documents], capacity)
    return Store(tokens, suffix_array(tokens, store.reach), store.reach)


def recent(documents: Sequence[Sequence[int] | np.ndarray], capacity: int) -> np.ndarray:
    """i32[capacity]: the last documents that fit, whole, each followed by -1, which also fills up. See ``append``."""
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
    """Writes datastore.safetensors and datastore.json. ``vocabulary`` is ``LM.vocabulary``, the tokenizer's fingerprint."""
    facts = {
        "vocabulary": vocabulary,
        "vocab_size": vocab_size,
        "tokens": int((store.tokens >= 0).sum()),
        "documents": len(split(store.tokens)),
        "reach": store.reach,
        "sources": list(sources),
    }
    array_files.write(
        directory, NAME, SCHEMA, {"tokens": store.tokens, "order": store.order}, facts
    )


def load(directory: str | os.PathLike, target: LM) -> Store:
    """Reads the store in ``directory``. Raises UserError: none there, damaged, or made with another tokenizer."""
    arrays, manifest = array_files.read(directory, NAME, SCHEMA, target, BUILD)
    reach = manifest.get("reach")
    whole = isinstance(reach, int) and not isinstance(reach, bool) and 0 < reach <= LONGEST
    if set(arrays) != {"tokens", "order"} or not whole:
        raise UserError(f"{directory} holds no datastore of specjax; build one with {BUILD}")
    store = Store(arrays["tokens"], arrays["order"], manifest["reach"])
    check(store, target)
    return store


def check(store: Store, target: LM) -> None:
    """Raises UserError if the store has ids that the target does not know."""
    if (top := store.tokens.max(initial=-1)) >= target.vocab_size:
        raise UserError(
            f"the datastore has the token id {top} and the target {target.vocab_size} tokens; it was built with another "
            f"tokenizer than the target's, build it again with {BUILD}"
        )


def split(tokens: np.ndarray) -> list[np.ndarray]:
    """The documents of a flat array, without separators and padding."""
    ends = np.flatnonzero(tokens < 0)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    return [tokens[a:b] for a, b in zip(starts, ends, strict=True) if b > a]


def flatten(documents: Sequence[Sequence[int]]) -> np.ndarray:
    """i32[n]: the documents that are not empty, each followed by -1. Raises UserError for ids below 0."""
    parts = [ids for document in documents if len(ids := _ids(document))]
    return (
        np.concatenate([np.append(ids, np.int32(SEPARATOR)) for ids in parts])
        if parts
        else np.zeros(0, np.int32)
    )


def _ids(document: Sequence[int] | np.ndarray) -> np.ndarray:
    ids = np.asarray(document)
    if ids.size and (ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0):
        raise UserError("a document has something else than token ids >= 0; give lists of ids")
    return ids.astype(np.int32).reshape(-1)


def suffix_array(tokens: np.ndarray, reach: int) -> np.ndarray:
    """i32[n]: the places of tokens i32[n], sorted by the ``reach`` tokens from there on; -1 beyond the end; ties by place."""
    size, known = len(tokens), 1
    rank = tokens.astype(np.int64) + 1
    order = np.argsort(rank, kind="stable")
    while known < reach:
        # Sorted by ``known`` tokens: the next ``step`` follow from the rank of the place ``step`` further on.
        step = min(known, reach - known)
        rank = _dense(rank, order)
        if rank[order[-1]] == size - 1:  # no two alike: further tokens change nothing
            break
        behind = np.zeros(
            size, np.int64
        )  # a -1 ends every store, so nothing sorts before it: rank 0, as beyond the end
        behind[: max(size - step, 0)] = rank[step:]
        rank = rank * size + behind
        order = np.argsort(rank, kind="stable")
        known += step
    return order.astype(np.int32)


def _dense(rank: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The same ranks as 0, 1, 2, ..."""
    new = np.empty_like(rank)
    new[order] = np.concatenate([[0], np.cumsum(np.diff(rank[order]) > 0)])
    return new
