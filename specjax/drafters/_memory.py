"""What drafters share that may look into past texts: a datastore among their parameters, and how it grows.

Nothing is remembered from row to row unless the caller asks for it (``Drafter.learn``), between batches, on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from specjax import datastore as stores
from specjax.datastore import REACH, Store
from specjax.drafters._checks import at_least
from specjax.errors import UserError
from specjax.types import LM, DecodeState, ModelParams, Params

Given = Store | str | os.PathLike | None


def load(target: LM, datastore: Given, max_ngram: int, memory: int) -> Store | None:
    """The datastore to begin with, or None. Raises UserError: one that does not fit, or too small a memory."""
    at_least("memory", memory, 2)
    store = datastore if datastore is None or isinstance(datastore, Store) else stores.load(datastore, target)
    if max_ngram > (REACH if store is None else store.reach):
        raise UserError(
            f"max_ngram is {max_ngram} and a datastore's reach {REACH if store is None else store.reach}; lower it"
        )
    if store is not None:
        stores.check(store, target)
    return store


def params(store: Store | None) -> Params:
    """What ``init_params`` returns."""
    return {} if store is None else {"tokens": jnp.asarray(store.tokens), "order": jnp.asarray(store.order)}


def learner(reach: int, memory: int) -> Callable[[ModelParams, DecodeState, Sequence[int]], Params]:
    """A ``Drafter.learn`` that appends the rows' outputs; the oldest texts go when more than ``memory`` tokens are kept."""

    def learn(given: ModelParams, state: DecodeState, lengths: Sequence[int]) -> Params:
        old = given.draft
        capacity = max(memory, old["tokens"].shape[0]) if old else memory
        store = (
            Store(np.asarray(old["tokens"]), np.asarray(old["order"]), reach) if old else stores.empty(memory, reach)
        )
        tokens, ends = np.asarray(state.tokens), np.asarray(state.length)
        outputs = [tokens[row, begin:end] for row, (begin, end) in enumerate(zip(lengths, ends, strict=True))]
        return params(stores.append(store, outputs, capacity))

    return learn
