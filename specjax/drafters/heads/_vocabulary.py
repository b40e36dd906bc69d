"""A draft vocabulary: the tokens that a drafter's own head can give.

EAGLE-3 (2503.01840) drafts only the tokens that are most frequent in its training text: a smaller
head is cheaper. The others have probability 0 in the draft and are emitted by the target.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.drafters.files.draft_vocabulary import check_tokens
from specjax.errors import UserError
from specjax.types import Array


def spread(ids: np.ndarray | None, logits: Array, vocab_size: int) -> Array:
    """f[...,V_d] -> f[...,V]: the logits at their tokens, -inf at all others.

    ``ids`` i32[V_d] ascending; None: the logits are of all tokens and stay as they are.
    """
    if ids is None:
        return logits
    # A gather: on CPUs a scatter of many rows is a loop over its elements.
    place = np.full(vocab_size, len(ids), np.int32)
    place[ids] = np.arange(len(ids), dtype=np.int32)
    padded = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, 1)], constant_values=-jnp.inf)
    return jnp.take(padded, jnp.asarray(place), axis=-1)


def gather(ids: np.ndarray | None, logits: Array) -> Array:
    """f[...,V] -> f[...,V_d]: the logits of the draft vocabulary."""
    return logits if ids is None else jnp.take(logits, jnp.asarray(ids), axis=-1)


def place_of(ids: np.ndarray | None, tokens: Array, vocab_size: int) -> Array:
    """i32[...]: the places of tokens in the draft vocabulary, -1 for others."""
    if ids is None:
        return tokens
    place = np.full(vocab_size, -1, np.int32)
    place[ids] = np.arange(len(ids))
    return jnp.asarray(place)[tokens]


def facts(ids: np.ndarray | None, vocab_size: int) -> tuple[tuple[str, Any], ...]:
    """What config.json must hold of a draft vocabulary."""
    # A drafter is a static argument, so its facts must have a hash.
    return () if ids is None else (("draft_ids", tuple(ids.tolist())), ("vocab_size", vocab_size))


def listed(ids: Any) -> tuple[int, ...] | None:
    """The key ``draft_ids`` as numbers; None: not given. Raises UserError."""
    if ids is None:
        return None
    array = np.asarray(ids)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError("draft_ids must be a list of token ids")
    return tuple(array.tolist())


def ids_of(value: tuple[int, ...] | None, size: int, vocab_size: int) -> np.ndarray | None:
    """The draft vocabulary i32[V_d]; ``size`` is V_d of the head. Raises UserError."""
    if value is None:
        if size != vocab_size:
            raise UserError(
                f"the network's head has {size} tokens and the vocabulary {vocab_size}; give "
                "draft_ids, the token of each"
            )
        return None
    ids = np.asarray(value)
    if len(ids) != size:
        raise UserError(
            f"draft_ids has {len(ids)} tokens and the network's head {size}; give one token each"
        )
    check_tokens("draft_ids", ids, vocab_size)
    # All tokens in order: the logits need no gather.
    return None if size == vocab_size else ids.astype(np.int32)
