"""A datastore among a drafter's parameters: how it is loaded, and how it grows.

No text passes from one row to another unless the caller asks for it (``Rare.learn``). That runs
on the host, between batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bound import Bound
from specjax.checks import whole
from specjax.data import datastore as stores
from specjax.data.datastore import REACH, Store
from specjax.drafters._limited import limited
from specjax.errors import UserError
from specjax.types import (
    CHAIN,
    DETERMINISTIC,
    LM,
    Context,
    DecodeState,
    Draft,
    Drafter,
    ModelParams,
    Params,
    Rare,
)


def load(target: LM, datastore: Store | str | os.PathLike | None, max_ngram: int) -> Store | None:
    """The datastore to begin with, or None. Raises UserError if it is missing or does not fit."""
    if datastore is None:
        return None
    if not isinstance(datastore, Store | str | os.PathLike):
        raise UserError(
            f"datastore is {str(datastore)[:40]!r}; "
            "give a directory written by configs/datastore.py, or a Store"
        )
    store = datastore if isinstance(datastore, Store) else stores.load(datastore, target)
    if max_ngram > store.reach:
        raise UserError(
            f"max_ngram is {max_ngram} and the datastore's reach {store.reach}; "
            "lower max_ngram, or build the datastore with a longer reach"
        )
    stores.check(store, target)
    return store


def reach(store: Store | None, max_ngram: int) -> int:
    """How many tokens the suffix array of the datastore is sorted by."""
    return max(REACH, max_ngram) if store is None else store.reach


def drafter(
    name: str,
    keys: Any,
    store: Store | None,
    row: Callable[..., tuple],
    nodes: int,
    depth: int | None = None,
    **others: Any,
) -> Drafter:
    """The drafter of a tree of depth ``depth``, or of a chain; with ``keys.memory`` it can learn.

    ``row(parameters, text, length, state)`` gives the first values of ``Draft`` in one row.
    """
    learn = learner(store, keys.max_ngram, keys.memory) if hasattr(keys, "memory") else None
    made = Drafter(
        propose=Bound(_propose, row, depth),
        nodes=nodes,
        init_params=lambda key: params(store),
        name=name,
        siblings=CHAIN if depth is None else DETERMINISTIC,
        depth=depth,
        rare=Rare(learn=learn),
        **others,
    )
    return limited(made, keys.control)


def _propose(row: Callable[..., tuple], depth: int | None, params, keys, context, state):
    values = jax.vmap(row, (None, 0, 0, 0))(params.draft, context.tokens, context.length, state)
    return Draft(*values, depth=depth), state


def prompt_length(params: ModelParams, context: Context, *_: Any) -> Any:
    """``Drafter.init``: the state is the length of the prompt."""
    return context.length


def params(store: Store | None) -> Params:
    """The value of ``init_params``: the store's arrays, {} without a store."""
    if store is None:
        return {}
    return {"tokens": jnp.asarray(store.tokens), "order": jnp.asarray(store.order)}


def learner(
    store: Store | None, max_ngram: int, memory: int
) -> Callable[[ModelParams, DecodeState, Sequence[int]], Params]:
    """A ``Rare.learn`` that adds the rows' outputs to the datastore.

    The datastore itself is kept. Of the outputs the newest are kept that fit into ``memory``
    tokens, as whole texts.
    """
    whole("memory", memory, 2)
    base = np.zeros(0, np.int32) if store is None else store.tokens
    return Bound(_learn, base, reach(store, max_ngram), memory)


def _learn(base: np.ndarray, reach: int, memory: int, model_params, state, lengths) -> Params:
    draft = model_params.draft
    earlier = np.asarray(draft["tokens"])[len(base) :] if draft else base[:0]
    tokens, ends = np.asarray(state.tokens), np.asarray(state.length)
    outputs = [row[begin:end] for row, begin, end in zip(tokens, lengths, ends, strict=True)]
    everything = np.concatenate([base, stores.recent([*stores.split(earlier), *outputs], memory)])
    return params(Store(everything, stores.suffix_array(everything, reach), reach))
