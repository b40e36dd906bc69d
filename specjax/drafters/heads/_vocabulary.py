"""A draft vocabulary: the tokens that a drafter's own head can give.

EAGLE-3 (2503.01840) drafts only the tokens that are most frequent in its training text: a smaller
head is cheaper. The others have probability 0 in the draft and are emitted by the target.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def spread(ids: np.ndarray | None, logits: jax.Array, vocab_size: int) -> jax.Array:
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


def gather(ids: np.ndarray | None, logits: jax.Array) -> jax.Array:
    """f[...,V] -> f[...,V_d]: the logits of the draft vocabulary."""
    return logits if ids is None else jnp.take(logits, jnp.asarray(ids), axis=-1)


def place_of(ids: np.ndarray | None, tokens: jax.Array, vocab_size: int) -> jax.Array:
    """i32[...]: the places of tokens in the draft vocabulary, -1 for others."""
    if ids is None:
        return tokens
    place = np.full(vocab_size, -1, np.int32)
    place[ids] = np.arange(len(ids))
    return jnp.asarray(place)[tokens]
