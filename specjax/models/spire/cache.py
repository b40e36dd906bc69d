"""A cache of constant size: the first positions of the text, and a ring of the newest ones.

With ``sinks`` s and W further slots, position p < s is in slot p, and position p >= s in slot
s + (p - s) mod W. Keys have the rotation of their true position. A text that fits has position p
in slot p.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as kv
from specjax import tree
from specjax.cache import KVBlock


class SparseCache(struct.PyTreeNode):
    """Keys and values of every layer; slots without a position have no meaning."""

    k: tuple[jax.Array, ...]  # [B,H,S,D] each
    v: tuple[jax.Array, ...]
    length: jax.Array  # i32[B] tokens committed
    sinks: int = struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        """S."""
        return self.k[0].shape[2]

    @property
    def ring(self) -> int:
        """The slots after those of the sinks; 0: no text is longer than the sinks."""
        return max(self.slots - self.sinks, 0)


def zeros(
    layers: int, batch: int, heads: int, slots: int, width: int, dtype, sinks: int, window: int
) -> SparseCache:
    """An empty cache for texts of ``slots`` tokens; it has at most ``sinks + window`` slots."""
    shape = (batch, heads, min(slots, sinks + window), width)
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(layers)) for _ in range(2))
    return SparseCache(k, v, jnp.zeros((batch,), jnp.int32), sinks)


def positions(cache: SparseCache) -> jax.Array:
    """i32[B,S]: the position in each slot; -1: none."""
    fixed = jnp.arange(cache.slots - cache.ring)
    first = jnp.where(fixed < cache.length[:, None], fixed, -1)
    if not cache.ring:
        return first
    later = kv.newest(cache.length - cache.sinks, cache.ring)
    return jnp.concatenate([first, jnp.where(later < 0, -1, later + cache.sinks)], 1)


def commit(
    cache: SparseCache, block: KVBlock, count: jax.Array, path: jax.Array | None = None
) -> SparseCache:
    """Appends the tokens at ``path[:count]`` of a block; arguments as those of ``LM.commit``.

    A slot is written only if a committed token has its place there.
    """
    size = block.output.shape[1] if path is None else path.shape[1]
    inside = jnp.arange(size) < count[:, None]
    kept: KVBlock = tree.mask(block, inside) if path is None else tree.take(block, path, inside)
    # With 64-bit types enabled (exactness tests), all indices of an update must have one type.
    start = kv.write_after(cache.length, kept.output).astype(jnp.result_type(int))
    slot = _slots(cache, start, count, size)
    row = jax.vmap(lambda buffer, new, at: buffer.at[:, at].set(new, mode="drop"))

    def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
        return row(buffer, new.swapaxes(1, 2).astype(buffer.dtype), slot)

    return cache.replace(
        k=tuple(map(put, cache.k, kept.k)),
        v=tuple(map(put, cache.v, kept.v)),
        length=cache.length + count,
    )


def _slots(cache: SparseCache, start: jax.Array, count: jax.Array, size: int) -> jax.Array:
    """i[B,M]: the slot of each token; S, which does not exist, for one that is not written."""
    place = jnp.arange(size)
    position = start[:, None] + place
    kept, slot = place < count[:, None], position
    if cache.ring:
        sink = position < cache.sinks
        # Of several tokens for one slot only the last is written.
        kept &= sink | (place >= count[:, None] - cache.ring)
        slot = jnp.where(sink, position, cache.sinks + (position - cache.sinks) % cache.ring)
    return jnp.where(kept, slot, cache.slots)
