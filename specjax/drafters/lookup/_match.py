"""The longest common suffixes of a text and the prefixes of a store, by comparing, on the device.

An occurrence is named by its end: the slot where its continuation begins. Comparing costs
O(longest * slots) and is one fused loop over memory. It needs no state, so no state has to be
restored when a draft is rejected.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def runs(store: jax.Array, tokens: jax.Array, length: jax.Array, longest: int) -> jax.Array:
    """How many tokens before each slot of ``store`` equal the last tokens of a text.

    Args:
        store: i32[n]; negative entries are separators and equal no token.
        tokens: i32[S], the text; entries beyond ``length`` are not read.
        length: i32[].
        longest: the largest count.

    Returns:
        i32[n]: entry ``end`` is the length of the longest common suffix of store[:end] and
        tokens[:length], at most ``longest``.
    """
    end = jnp.arange(store.shape[0])
    matched, run = jnp.ones(end.shape, bool), jnp.zeros(end.shape, jnp.int32)
    for back in range(1, longest + 1):
        # behind[end] = store[end - back]
        behind = jnp.roll(store, back)
        matched &= (
            (end >= back) & (behind == tokens[length - back]) & (behind >= 0) & (length >= back)
        )
        run += matched
    return run


def own_runs(tokens: jax.Array, length: jax.Array, longest: int) -> jax.Array:
    """``runs`` of a text in itself, i32[S], at the places where at least one token follows.

    The end of the text is not an occurrence of itself: there, and beyond it, entries are 0.
    """
    return jnp.where(jnp.arange(tokens.shape[0]) < length, runs(tokens, tokens, length, longest), 0)


def best(run: jax.Array, count: int, longest: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` longest runs, the latest first among equals.

    Returns:
        The ends and the runs, i32[count] each; a run of 0 is no match.
    """
    size = run.shape[0]
    # Distinct keys, so that the order does not depend on the backend. float32 holds them exactly
    # and is several times faster.
    exact = (longest + 1) * size < 1 << 24
    key = jnp.where(run > 0, run * size + jnp.arange(size), -1)
    top = jax.lax.top_k(key.astype(jnp.float32) if exact else key, min(count, size))[0]
    top = top.astype(jnp.int32)
    top = jnp.pad(top, (0, count - top.shape[0]), constant_values=-1)
    return jnp.where(top < 0, 0, top % size), jnp.where(top < 0, 0, top // size)


def windows(
    store: jax.Array, ends: jax.Array, depth: int, length: jax.Array | None = None
) -> jax.Array:
    """The tokens of ``store`` after the ends i32[K]: i32[K,depth].

    Entries are -1 from ``length`` (None: the end of the store) or from a separator on.
    """
    place = ends[:, None] + jnp.arange(depth)
    tokens = jnp.take(store, place, mode="clip")
    inside = (place < (store.shape[0] if length is None else length)) & (tokens >= 0)
    return jnp.where(jnp.cumprod(inside, -1) > 0, tokens, -1)
