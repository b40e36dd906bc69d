"""Randomness: one key per row, folded with the purpose and the round, so that no noise is reused.

A row's key is made of the seed and the row's own number, never of its index in the batch. Noise
that may influence a decision is keyed by the *round* (the noise of a discarded slot must not be
used again). Only the target's own sampler is keyed by the absolute *position*: sample-then-match
and plain decoding then draw the same token at the same position. Drafters may read that noise if
the emitted tokens are exactly the target's draws, whatever was drafted: coupled drafts.

Rounds are counted from prefill: to prefill the same rows again, for example with a longer
conversation, use another seed. A system that runs inside the round of another one takes
``keys.inner(i)`` as its keys, never ``keys`` themselves.

Rules and drafters request *coins* and *draws*, not raw noise. ``specjax.testing`` can then replace
``RowKeys`` by a script and enumerate every outcome of the same code with its exact probability.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sampling

DRAFT, ACCEPT, RESIDUAL, TARGET, INNER = range(5)
PURPOSES = 5


class Coins(struct.PyTreeNode):
    """One coin for each node of a draft. Each coin may be used once."""

    uniform: jax.Array  # f[B,N] in [0, 1)

    def flip(self, kept: jax.Array, total: jax.Array, node: jax.Array | None = None) -> jax.Array:
        """True with probability min(1, kept / total), without dividing; 0/0 is False.

        All coins at once (``node`` None; masses and result [B,N]), or one per row (``node``
        i32[B]; masses [B]).
        """
        u = self.uniform
        if node is not None:
            u = jnp.take_along_axis(u, node[:, None], 1)[:, 0]
        return u * total < kept


class RowKeys(struct.PyTreeNode):
    """The keys of one round."""

    base: jax.Array  # key[B]
    round: jax.Array  # i32[]
    position: jax.Array  # i32[B] position of the first token that this round emits
    target: jax.Array | None = None  # key[B] of the target's sampler; None = base
    # Coins are drawn for at least so many nodes, so that the coin of a node is the same when a
    # round verifies only the first nodes of a draft.
    nodes: int = struct.field(pytree_node=False, default=0)

    def at_round(self, purpose: int) -> jax.Array:
        """key[B] for this round and purpose."""
        return _fold(self.base, jnp.broadcast_to(self.round, self.position.shape), purpose)

    def at_position(self, depth: jax.Array) -> jax.Array:
        """key[B,T] of the target's sampler at ``position + depth``, depth i32[B,T] or i32[T]."""
        depth = jnp.broadcast_to(depth, (self.base.shape[0], depth.shape[-1]))
        keys = self.base if self.target is None else self.target
        return jax.vmap(_fold, (None, 1, None), 1)(keys, self.position[:, None] + depth, TARGET)

    def coins(self, count: int, dtype=jnp.float32) -> Coins:
        """``count`` coins per row, to accept or reject with. Call it once per round."""
        size = max(count, self.nodes)
        uniform = jax.vmap(lambda k: jax.random.uniform(k, (size,), dtype))
        return Coins(uniform(self.at_round(ACCEPT))[:, :count])

    def draw(self, purpose: int, weights: jax.Array, index=None) -> jax.Array:
        """One token per row from unnormalised weights: f[B,V] -> i32[B], or f[B,n,V] -> i32[B,n].

        ``index`` (i32[], or i32[n]) distinguishes the draws of one purpose in one round.
        """
        return sampling.draw_rows(self._keys(purpose, weights, index), weights)

    def draw_at(self, depth, weights: jax.Array, active: jax.Array | None = None) -> jax.Array:
        """The target's own sampler at ``position + depth``: depth i32[], weights f[B,V] -> i32[B].

        Noise is keyed by position: every draw at the same position uses the same noise, in plain
        decoding too. ``active`` bool[B] marks the rows in which the result is used.
        """
        del active  # only the script of specjax.testing reads it
        return sampling.draw_rows(self.at_position(jnp.reshape(depth, (1,)))[:, 0], weights)

    def draw_coupled(
        self, depth, weights: jax.Array, streams: int, active: jax.Array | None = None
    ) -> jax.Array:
        """The target's token of ``coupled`` at ``position + depth``: weights f[B,V] -> i32[B].

        The Gumbel noise of a token is the largest of its ``streams``: the law is that of the
        weights for any number. ``active`` as in ``draw_at``.
        """
        del active
        depth, each = jnp.reshape(depth, (1,)), jnp.arange(streams)
        noise = self._gumbel(depth, each, weights.shape[-1], weights.dtype).max(1)
        return _race(weights, noise)

    def guess_coupled(
        self, depth, weights: jax.Array, streams: jax.Array | np.ndarray
    ) -> jax.Array:
        """A drafter's tokens by that noise: weights f[B,n,V], streams i32[n] -> i32[B,n]."""
        depth, each = jnp.reshape(depth, (1,)), jnp.asarray(streams)
        return _race(weights, self._gumbel(depth, each, weights.shape[-1], weights.dtype))

    def _gumbel(self, depth: jax.Array, streams: jax.Array, vocab: int, dtype: Any) -> jax.Array:
        """f[B,n,V]: the noise at ``position + depth`` (i32[1]) of the streams i32[n]."""
        fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
        keys = fold(self.at_position(depth)[:, 0], streams)
        noise = functools.partial(jax.random.gumbel, shape=(vocab,), dtype=dtype, mode="high")
        return jax.vmap(jax.vmap(noise))(keys)

    def draw_distinct(
        self, purpose: int, weights: jax.Array, count: int, index=None
    ) -> tuple[jax.Array, jax.Array]:
        """``count`` distinct tokens per row, drawn in sequence without replacement.

        ``weights`` f[B,V] or f[B,n,V]. Returns tokens i32[...,count] and which of them exist (bool:
        there are at most as many as positive weights). Each token has the distribution of the
        weights without the tokens before it. Gumbel top-k, Kool et al. 2019 (1903.06059).
        """

        # The default mode is bounded by 15.9: it draws tokens rarer than about 1e-6 too seldom.
        def noise(key):
            return jax.random.gumbel(key, weights.shape[-1:], weights.dtype, mode="high")

        keys = self._keys(purpose, weights, index)
        for _ in range(keys.ndim):
            noise = jax.vmap(noise)
        noisy = jnp.where(weights > 0, jnp.log(weights) + noise(keys), -jnp.inf)
        scores, tokens = jax.lax.top_k(noisy, count)
        return tokens.astype(jnp.int32), scores > -jnp.inf

    def inner(self, index: int | jax.Array, same_target: bool = False) -> RowKeys:
        """Keys for part ``index`` of a combined drafter, or for a system inside this round.

        By default the part has another target, and its sampler must not share the noise of the
        outer target. ``same_target`` keeps the noise of the outer target's sampler, for a part that
        drafts for the same target and guesses with that noise.
        """
        fold = jax.vmap(lambda k: jax.random.fold_in(k, index))
        outer = self.base if self.target is None else self.target
        base, target = fold(self.at_round(INNER)), outer if same_target else None
        return self.replace(base=base, target=target, nodes=0)

    def _keys(self, purpose: int, weights: jax.Array, index) -> jax.Array:
        """key[B], or key[B,n] for weights f[B,n,V]."""
        keys = self.at_round(purpose)
        if index is None:
            return keys
        fold = jax.vmap(jax.random.fold_in, (0, None))
        return fold(keys, index) if weights.ndim == 2 else jax.vmap(fold, (None, 0), 1)(keys, index)


def _race(weights: jax.Array, noise: jax.Array) -> jax.Array:
    """i32[...]: the token of weights f[...,V] with the highest log-weight plus noise."""
    return sampling.argmax(jnp.where(weights > 0, jnp.log(weights) + noise, -jnp.inf))


def _fold(keys: jax.Array, counter: jax.Array, purpose: int) -> jax.Array:
    """Folds (counter, purpose) as one number: one hash instead of two.

    Unique for at least 2^29 rounds or positions (32 bits).
    """
    return jax.vmap(jax.random.fold_in)(keys, counter * PURPOSES + purpose)


def row_keys(seed: int, rows: int | Sequence[int]) -> jax.Array:
    """key[B] for the rows numbered ``0..rows-1``, or for the given row numbers."""
    ids = jnp.arange(rows) if isinstance(rows, int) else jnp.asarray(list(rows))
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(ids)


# Folded into a row's key before the number of a sample. Counters are below 5 * 2^29.
_SAMPLE = 2**32 - 1


def sample_keys(seed: int, prompts: int | Sequence[int], samples: int) -> jax.Array:
    """key[P*n] for n samples of each prompt, a prompt's next to each other.

    The first sample has the key of ``row_keys``; sample i has the same key for every ``samples``
    above i. ``prompts`` as in ``row_keys``.
    """
    return _with_samples(row_keys(seed, prompts), samples)


@functools.partial(jax.jit, static_argnums=1)
def _with_samples(keys: jax.Array, samples: int) -> jax.Array:
    def one(key: jax.Array) -> jax.Array:
        apart = jax.random.fold_in(key, np.uint32(_SAMPLE))
        others = jax.vmap(jax.random.fold_in, (None, 0))(apart, jnp.arange(1, samples))
        return jnp.concatenate([key[None], others])

    return jax.vmap(one)(keys).reshape(-1)
