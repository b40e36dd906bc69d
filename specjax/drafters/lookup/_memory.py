"""What drafters share that may look into past texts: a datastore among their parameters, and how it grows.

Nothing is remembered from row to row unless the caller asks for it (``Drafter.learn``), between batches, on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from specjax.checks import whole
from specjax.data import datastore as stores
from specjax.data.datastore import REACH, Store
from specjax.errors import UserError
from specjax.types import LM, DecodeState, ModelParams, Params

Given = Store | str | os.PathLike | None


def load(target: LM, datastore: Given, max_ngram: int) -> Store | None:
    """The datastore to begin with, or None. Raises UserError: none there, or one that does not fit."""
    if datastore is None:
        return None
    if not isinstance(datastore, Store | str | os.PathLike):
        raise UserError(
            f"datastore is {str(datastore)[:40]!r}; give a directory that configs/datastore.py wrote, or a Store"
        )
    store = datastore if isinstance(datastore, Store) else stores.load(datastore, target)
    if max_ngram > store.reach:
        raise UserError(
            f"max_ngram is {max_ngram} and the datastore's reach {store.reach}; lower it, or build with more"
        )
    stores.check(store, target)
    return store


def reach(store: Store | None, max_ngram: int) -> int:
    """How many tokens the order of what is looked up goes by."""
    return max(REACH, max_ngram) if store is None else store.reach


def params(store: Store | None) -> Params:
    """What ``init_params`` returns."""
    return (
        {}
        if store is None
        else {"tokens": jnp.asarray(store.tokens), "order": jnp.asarray(store.order)}
    )


def learner(
    store: Store | None, max_ngram: int, memory: int
) -> Callable[[ModelParams, DecodeState, Sequence[int]], Params]:
    """A ``Drafter.learn`` that remembers the rows' outputs beside the datastore, which stays: the last ``memory`` tokens of
    them, in whole texts; the oldest go."""
    whole("memory", memory, 2)
    base = np.zeros(0, np.int32) if store is None else store.tokens
    by = reach(store, max_ngram)

    def learn(given: ModelParams, state: DecodeState, lengths: Sequence[int]) -> Params:
        known = np.asarray(given.draft["tokens"])[len(base) :] if given.draft else base[:0]
        tokens, ends = np.asarray(state.tokens), np.asarray(state.length)
        outputs = [
            tokens[row, begin:end]
            for row, (begin, end) in enumerate(zip(lengths, ends, strict=True))
        ]
        texts = stores.recent([*stores.split(known), *outputs], memory)
        whole = np.concatenate([base, texts])
        return params(Store(whole, stores.suffix_array(whole, by), by))

    return learn
