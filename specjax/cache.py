"""The key/value cache: two arrays per layer and a length per row.

Slots beyond the length hold leftovers of rejected tokens; no attention mask includes them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer."""

    # [B,H,S,D] each (H = key/value heads). Heads come first, so that attention needs no transpose.
    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array  # i32[B]


def zeros(layers: int, batch: int, heads: int, slots: int, width: int, dtype) -> KVCache:
    """An empty cache of ``slots`` slots."""

    def one() -> jax.Array:
        return jnp.zeros((batch, heads, slots, width), dtype)

    return KVCache(
        k=tuple(one() for _ in range(layers)),
        v=tuple(one() for _ in range(layers)),
        length=jnp.zeros((batch,), jnp.int32),
    )


def write(buffer: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Puts ``new`` [B,H,T,D] at slots ``start[b] + i`` of ``buffer`` [B,H,S,D].

    The buffer must have room for T slots from ``start[b]`` on.
    """
    put = jax.vmap(lambda row, block, at: jax.lax.dynamic_update_slice(row, block, (0, at, 0)))
    return put(buffer, new.astype(buffer.dtype), start)


def commit(cache: KVCache, count: jax.Array, path: jax.Array | None = None) -> KVCache:
    """Advances each row by ``count`` i32[B]; with a ``path``, first moves its nodes into place.

    ``path`` i32[B,M] holds node ids after the root, -1 padded.
    """
    if path is not None:
        # The gather reads the old buffer, so overlapping source and destination are safe.
        source = cache.length[:, None] + 1 + jnp.maximum(path, 0)
        take = jax.vmap(lambda buffer, slots: jnp.take(buffer, slots, axis=1, mode="clip"))

        def compact(buffer: jax.Array) -> jax.Array:
            return write(buffer, take(buffer, source), cache.length + 1)

        cache = cache.replace(k=tuple(map(compact, cache.k)), v=tuple(map(compact, cache.v)))
    return cache.replace(length=cache.length + count)
