"""Randomness: one key per row, folded with the purpose and the round, so that no noise is ever used twice.

A row's key is made of the seed and the row's own number, never of its place in the batch. Noise that may influence
a decision is keyed by the *round* (a discarded slot's noise must not come back). Only the target's own sampler is keyed
by the absolute *position*: sample-then-match and plain decoding then draw the same token at the same place.

Rounds are counted from prefill: who prefills the same rows again, say with a longer conversation, gives them another seed.
A system that runs inside another's round takes ``keys.at_round(DRAFT)`` as its own base keys, never ``keys.base``.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

DRAFT, ACCEPT, RESIDUAL, TARGET = range(4)
PURPOSES = 4


class RowKeys(struct.PyTreeNode):
    """The keys of one round."""

    base: jax.Array  # key[B]
    round: jax.Array  # i32[]
    position: jax.Array  # i32[B] where the first token of this round will stand

    def at_round(self, purpose: int) -> jax.Array:
        """key[B] for this round and purpose."""
        return _fold(self.base, jnp.broadcast_to(self.round, self.position.shape), purpose)

    def at_position(self, depth: jax.Array) -> jax.Array:
        """key[B,T] of the target's sampler at ``position + depth``; ``depth`` is i32[B,T] or i32[T]."""
        where = self.position[:, None] + jnp.broadcast_to(depth, (self.base.shape[0], depth.shape[-1]))
        return jax.vmap(_fold, (None, 1, None), 1)(self.base, where, TARGET)


def _fold(keys: jax.Array, counter: jax.Array, purpose: int) -> jax.Array:
    """Folds (counter, purpose) as one number: unique up to 2^30 rounds, and half the hashing of two folds."""
    return jax.vmap(jax.random.fold_in)(keys, counter * PURPOSES + purpose)


def row_keys(seed: int, rows: int | Sequence[int]) -> jax.Array:
    """key[B] for the rows numbered ``0..rows-1``, or for the given row numbers."""
    ids = jnp.arange(rows) if isinstance(rows, int) else jnp.asarray(list(rows))
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(ids)
