"""Where the end of a text occurred before: the longest common suffixes, by comparing, on the device.

An occurrence is named by its end: the slot where its continuation begins. Comparing costs O(longest * slots), is one fused loop
over memory that needs no state, and so never has to be undone when a draft is rejected.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def runs(store: jax.Array, tokens: jax.Array, length: jax.Array, longest: int) -> jax.Array:
    """How many tokens before each slot of ``store`` equal the last tokens of a text, up to ``longest``.

    Args:
        store: i32[n]; negative entries equal nothing (separators).
        tokens: i32[S], the text; what lies beyond ``length`` is not looked at.
        length: i32[].

    Returns:
        i32[n]: entry ``end`` is the length of the longest common suffix of store[:end] and tokens[:length].
    """
    end = jnp.arange(store.shape[0])
    matched, run = jnp.ones(end.shape, bool), jnp.zeros(end.shape, jnp.int32)
    for back in range(1, longest + 1):
        behind = jnp.roll(store, back)  # behind[end] = store[end - back]
        matched &= (
            (end >= back) & (behind == tokens[length - back]) & (behind >= 0) & (length >= back)
        )
        run += matched
    return run


def own_runs(tokens: jax.Array, length: jax.Array, longest: int) -> jax.Array:
    """``runs`` of a text in itself, i32[S], where at least one token follows: its end is no occurrence of itself."""
    return jnp.where(jnp.arange(tokens.shape[0]) < length, runs(tokens, tokens, length, longest), 0)


def best(run: jax.Array, count: int, longest: int) -> tuple[jax.Array, jax.Array]:
    """The ends of the ``count`` longest runs, the latest first among equals: (ends, runs) i32[count]; where there is none the
    run is 0."""
    size = run.shape[0]
    # Distinct keys, so that no order is left to the backend; float32 holds them exactly and is several times quicker.
    exact = (longest + 1) * size < 1 << 24
    key = jnp.where(run > 0, run * size + jnp.arange(size), -1)
    top = jax.lax.top_k(key.astype(jnp.float32) if exact else key, min(count, size))[0].astype(
        jnp.int32
    )
    top = jnp.pad(top, (0, count - top.shape[0]), constant_values=-1)
    return jnp.where(top < 0, 0, top % size), jnp.where(top < 0, 0, top // size)


def windows(
    store: jax.Array, ends: jax.Array, depth: int, length: jax.Array | None = None
) -> jax.Array:
    """What follows the ends i32[K] in ``store``: i32[K,depth], -1 from ``length`` (the whole store) or a separator on."""
    place = ends[:, None] + jnp.arange(depth)
    found = jnp.take(store, place, mode="clip")
    inside = (place < (store.shape[0] if length is None else length)) & (found >= 0)
    return jnp.where(jnp.cumprod(inside, -1) > 0, found, -1)
