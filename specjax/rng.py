"""Randomness: one key per row, folded with the purpose and the round, so that no noise is ever used twice.

A row's key is made of the seed and the row's own number, never of its place in the batch. Noise that may influence
a decision is keyed by the *round* (a discarded slot's noise must not come back). Only the target's own sampler is keyed
by the absolute *position*: sample-then-match and plain decoding then draw the same token at the same place.

Rounds are counted from prefill: who prefills the same rows again, say with a longer conversation, gives them another seed.
A system that runs inside another's round takes ``keys.inner(i)`` as its own keys, never ``keys`` themselves.

Rules and drafters ask for *coins* and *draws*, not for raw noise: ``specjax.testing`` then puts a script in the place of
``RowKeys`` and walks through every outcome of the very same code, with its exact probability.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from specjax import sampling

DRAFT, ACCEPT, RESIDUAL, TARGET, INNER = range(5)
PURPOSES = 5


class Coins(struct.PyTreeNode):
    """One coin for each node of a draft, tossed when it is asked for. Each may be asked for once."""

    uniform: jax.Array  # f[B,N] in [0, 1)

    def flip(self, kept: jax.Array, total: jax.Array, node: jax.Array | None = None) -> jax.Array:
        """True with probability min(1, kept / total), without dividing; 0/0 is False.

        All coins at once (``node`` None; masses and result [B,N]), or one per row (``node`` i32[B]; masses [B]).
        """
        u = (
            self.uniform
            if node is None
            else jnp.take_along_axis(self.uniform, node[:, None], 1)[:, 0]
        )
        return u * total < kept


class RowKeys(struct.PyTreeNode):
    """The keys of one round."""

    base: jax.Array  # key[B]
    round: jax.Array  # i32[]
    position: jax.Array  # i32[B] where the first token of this round will stand
    target: jax.Array | None = None  # key[B] of the target's sampler; None = base

    def at_round(self, purpose: int) -> jax.Array:
        """key[B] for this round and purpose."""
        return _fold(self.base, jnp.broadcast_to(self.round, self.position.shape), purpose)

    def at_position(self, depth: jax.Array) -> jax.Array:
        """key[B,T] of the target's sampler at ``position + depth``; ``depth`` is i32[B,T] or i32[T]."""
        where = self.position[:, None] + jnp.broadcast_to(
            depth, (self.base.shape[0], depth.shape[-1])
        )
        return jax.vmap(_fold, (None, 1, None), 1)(
            self.base if self.target is None else self.target, where, TARGET
        )

    def coins(self, count: int, dtype=jnp.float32) -> Coins:
        """``count`` coins per row, to accept or reject with. Once a round."""
        return Coins(
            jax.vmap(lambda k: jax.random.uniform(k, (count,), dtype))(self.at_round(ACCEPT))
        )

    def draw(self, purpose: int, weights: jax.Array, index=None) -> jax.Array:
        """One token per row from unnormalised weights f[B,V] (or n of them from f[B,n,V]): i32[B] (i32[B,n]).

        ``index`` (i32[], or i32[n]) tells the draws of one purpose in one round apart.
        """
        return sampling.draw_rows(self._keys(purpose, weights, index), weights)

    def draw_at(self, depth, weights: jax.Array, active: jax.Array | None = None) -> jax.Array:
        """The target's own sampler at ``position + depth``, depth i32[] and weights f[B,V] -> i32[B].

        Noise is keyed by position: whoever asks for the same place gets the same noise, plain decoding too. ``active``
        bool[B] marks the rows whose result is used.
        """
        del active  # the script needs it
        return sampling.draw_rows(self.at_position(jnp.reshape(depth, (1,)))[:, 0], weights)

    def draw_distinct(
        self, purpose: int, weights: jax.Array, count: int, index=None
    ) -> tuple[jax.Array, jax.Array]:
        """``count`` distinct tokens per row, drawn one after the other without replacement from weights f[B,V] or f[B,n,V].

        Gumbel top-k (Kool et al. 2019, 1903.06059): in this order, each has the law of the weights less the tokens before
        it. Returns tokens i32[...,count] and which of them exist (bool; there are no more than positive weights).
        """

        # The quick mode stops at 15.9 and draws tokens rarer than about 1e-6 too seldom.
        def noise(key):
            return jax.random.gumbel(key, weights.shape[-1:], weights.dtype, mode="high")

        keys = self._keys(purpose, weights, index)
        for _ in range(keys.ndim):
            noise = jax.vmap(noise)
        scores, tokens = jax.lax.top_k(
            jnp.where(weights > 0, jnp.log(weights) + noise(keys), -jnp.inf), count
        )
        return tokens.astype(jnp.int32), scores > -jnp.inf

    def inner(self, index: int, same_target: bool = False) -> RowKeys:
        """Keys for the ``index``-th part of a drafter that is made of several, or for a system that runs inside this round.

        Such a system has a target of its own, whose sampler must not have the outer one's noise. ``same_target``: it has not,
        and a part that guesses with the target's noise finds it.
        """
        fold = jax.vmap(lambda k: jax.random.fold_in(k, index))
        outer = self.base if self.target is None else self.target
        return self.replace(base=fold(self.at_round(INNER)), target=outer if same_target else None)

    def _keys(self, purpose: int, weights: jax.Array, index) -> jax.Array:
        """key[B], or key[B,n] for weights f[B,n,V]."""
        keys = self.at_round(purpose)
        if index is None:
            return keys
        fold = jax.vmap(jax.random.fold_in, (0, None))
        return fold(keys, index) if weights.ndim == 2 else jax.vmap(fold, (None, 0), 1)(keys, index)


def _fold(keys: jax.Array, counter: jax.Array, purpose: int) -> jax.Array:
    """Folds (counter, purpose) as one number: unique up to 2^30 rounds, and half the hashing of two folds."""
    return jax.vmap(jax.random.fold_in)(keys, counter * PURPOSES + purpose)


def row_keys(seed: int, rows: int | Sequence[int]) -> jax.Array:
    """key[B] for the rows numbered ``0..rows-1``, or for the given row numbers."""
    ids = jnp.arange(rows) if isinstance(rows, int) else jnp.asarray(list(rows))
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(ids)
