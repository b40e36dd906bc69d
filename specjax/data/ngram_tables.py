"""Tables of n-gram counts, for ``drafters/lookup/ngram_lm.py``. Host side: count, save, load.

Every row has the most frequent successors of a context and their probabilities, which sum to 1.
Contexts of two tokens are looked up in a hash table that stores the contexts, so two contexts are
never confused. Contexts that get no slot in the table, the rarest, are left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax import checks
from specjax.data import array_files
from specjax.data.datastore import flatten
from specjax.errors import UserError
from specjax.types import LM

NAME, SCHEMA = "ngram_tables", 1
BUILD = "--config=configs/ngram_tables.py and this target"
PROBES = 8  # consecutive slots in which a context may be stored

Array = np.ndarray | jax.Array


class Tables(NamedTuple):
    """Counts as probabilities.

    V tokens, K successors per row, C contexts of two tokens, H >= 2C slots of the hash table.
    """

    unigram: np.ndarray  # f32[V], all positive
    bigram_ids: np.ndarray  # i32[V,K] successors, the most frequent first; -1 = no more
    bigram_probs: np.ndarray  # f32[V,K]
    trigram_keys: np.ndarray  # i32[H,2] the context in each slot, -1 = none
    trigram_rows: np.ndarray  # i32[H] its row
    trigram_ids: np.ndarray  # i32[C,K]
    trigram_probs: np.ndarray  # f32[C,K]


def count(
    documents: Sequence[Sequence[int]],
    vocab_size: int,
    *,
    successors: int = 16,
    contexts: int = 100_000,
    smoothing: float = 0.1,
) -> Tables:
    """Counts the n-grams of some documents; no n-gram crosses documents.

    Args:
        documents: token ids in 0..vocab_size-1.
        vocab_size: V.
        successors: K, the number kept for each context, 8 bytes each. Of equally frequent
            successors, the lower ids are kept.
        contexts: how many contexts of two tokens are kept, the most frequent ones.
        smoothing: added to each token's count for the unigram probabilities (add-k).

    Raises:
        UserError: no tokens, ids outside the vocabulary, numbers out of range.
    """
    checks.counts(successors=successors, contexts=contexts)
    checks.number("smoothing", smoothing, "above 0", lambda value: value > 0)
    tokens = flatten(documents).astype(np.int64)
    if not len(tokens):
        raise UserError("the documents hold no token; tables need text")
    if tokens.max() >= vocab_size:
        raise UserError(
            f"a document has the token id {tokens.max()}; ids must be in 0..{vocab_size - 1}"
        )
    if vocab_size >= 1 << 21:  # three ids would not fit into 63 bits
        raise UserError(
            f"the vocabulary has {vocab_size} tokens; tables hold at most {(1 << 21) - 1}"
        )
    successors = min(successors, vocab_size)
    single = np.bincount(tokens[tokens >= 0], minlength=vocab_size) + smoothing
    pairs = tokens[:-1] * vocab_size + tokens[1:]
    real = (tokens[:-1] >= 0) & (tokens[1:] >= 0)
    ids, probs = _rows(pairs[real], np.arange(vocab_size), vocab_size, successors)
    triples = pairs[:-1] * vocab_size + tokens[2:]
    triples = triples[real[:-1] & real[1:]]
    seen, times = np.unique(triples // vocab_size, return_counts=True)
    chosen = seen[np.argsort(-times, kind="stable")[:contexts]]
    keys, rows, left = _hashed(chosen, vocab_size)
    three_ids, three_probs = _rows(triples, chosen[left], vocab_size, successors)
    unigram = (single / single.sum()).astype(np.float32)
    return Tables(unigram, ids, probs, keys, rows, three_ids, three_probs)


def _rows(
    grams: np.ndarray, contexts: np.ndarray, vocab_size: int, keep: int
) -> tuple[np.ndarray, np.ndarray]:
    """(ids i32[C,K], probabilities f32[C,K]) of the successors of ``contexts``.

    ``grams`` are context * V + successor, one for each occurrence.
    """
    kinds, times = np.unique(grams, return_counts=True)
    # By context, then the most frequent first, then the lower id first.
    order = np.lexsort((kinds, -times, kinds // vocab_size))
    # A last one of no context, where a context has fewer successors.
    ordered, times = np.append(kinds[order], np.iinfo(np.int64).max), np.append(times[order], 0)
    of, successor = np.divmod(ordered, vocab_size)
    place = np.searchsorted(of, contexts)[:, None] + np.arange(keep)
    place = np.minimum(place, len(kinds))
    real = of[place] == contexts[:, None]
    weight = np.where(real, times[place], 0).astype(np.float64)
    total = np.maximum(weight.sum(1, keepdims=True), 1)
    ids = np.where(real, successor[place], -1).astype(np.int32)
    return ids, (weight / total).astype(np.float32)


def _hashed(contexts: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(keys i32[H,2], rows i32[H], indices of the kept contexts) of the hash table.

    ``contexts`` are first * V + second, the most important first. Each gets the first of its PROBES
    slots that no more important context has.
    """
    slots = 1 << max(2 * len(contexts) - 1, PROBES).bit_length()
    keys, rows = np.full((slots, 2), -1, np.int32), np.zeros(slots, np.int32)
    pair = np.stack([contexts // vocab_size, contexts % vocab_size], 1).astype(np.int32)
    start, waiting, kept = slot(pair[:, 0], pair[:, 1], slots), np.arange(len(contexts)), []
    for probe in range(PROBES):
        place = (start[waiting] + probe) % slots
        _, first = np.unique(place, return_index=True)
        first = first[keys[place[first], 0] < 0]
        keys[place[first]] = pair[waiting[first]]
        rows[place[first]] = waiting[first]
        kept.append(waiting[first])
        waiting = np.delete(waiting, first)
    left = np.sort(np.concatenate(kept))
    rows = np.where(keys[:, 0] >= 0, np.searchsorted(left, rows), 0).astype(np.int32)
    return keys, rows, left


def slot(first: Array, second: Array, slots: int) -> Array:
    """The first slot for the context (first, second), i32 in 0..slots-1. For NumPy and JAX arrays.

    ``slots`` must be a power of two.
    """
    return (hashed(first, second) & np.uint32(slots - 1)).astype(np.int32)


def hashed(first: Array, second: Array) -> Array:
    """uint32 for a place in a hash table, mixed by multiplying and shifting."""
    a = first.astype(np.uint32) * np.uint32(0x9E3779B1)
    mixed = a ^ second.astype(np.uint32) * np.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x2C1B3C6D)
    mixed = (mixed ^ (mixed >> np.uint32(12))) * np.uint32(0x297A2D39)
    return mixed ^ (mixed >> np.uint32(15))


def save(
    directory: str | os.PathLike,
    tables: Tables,
    *,
    vocabulary: str | None,
    sources: Sequence[str] = (),
) -> None:
    """Writes ngram_tables.safetensors and ngram_tables.json. Raises UserError.

    ``vocabulary`` is ``LM.vocabulary``, the tokenizer's fingerprint; ``sources`` name the texts.
    """
    facts = {
        "vocabulary": vocabulary,
        "vocab_size": len(tables.unigram),
        "contexts": len(tables.trigram_ids),
        "successors": tables.bigram_ids.shape[1],
        "sources": list(sources),
    }
    array_files.write(directory, NAME, SCHEMA, tables._asdict(), facts)


def load(directory: str | os.PathLike, target: LM) -> Tables:
    """Reads the tables in ``directory``.

    Raises UserError if there are none, they are damaged, or were built with another tokenizer.
    """
    arrays, _ = array_files.read(directory, NAME, SCHEMA, target, BUILD)
    if set(arrays) != set(Tables._fields):
        raise UserError(f"{directory} has no n-gram tables of specjax; build them with {BUILD}")
    tables = Tables(**arrays)
    check(tables, target)
    return tables


def check(tables: Tables, target: LM) -> None:
    """Raises UserError unless the tables have the target's vocabulary size and probabilities."""
    if len(tables.unigram) != target.vocab_size:
        raise UserError(
            f"the n-gram tables count {len(tables.unigram)} tokens and the target has "
            f"{target.vocab_size}; they were built with another tokenizer than the target's, "
            f"build them again with {BUILD}"
        )
    for name, array in zip(tables._fields, tables, strict=True):
        array = np.asarray(array)
        if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array >= 0).all()):
            raise UserError(
                f"{name} of the n-gram tables has values that are not probabilities; "
                f"build them again with {BUILD}"
            )
