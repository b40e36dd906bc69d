"""A model that continues the text of a cache without writing to it.

A drafter that runs a speculative system inside its proposal needs a model whose text grows and
shrinks again: what the inner system emits is only a draft. The overlay of a model reads the cache
of the committed text (its *base*: the model's own cache, a target's cache, or a sparse view of it)
and puts what it commits into a small buffer, a block of the model itself. Nothing is copied, and
after a rejection there is nothing to undo: ``settle`` commits the accepted tokens of the buffer to
the base, and the others are forgotten. An overlay may be the base of another overlay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.tree import Layout
from specjax.types import LM, Array, Params


class OverlayCache(struct.PyTreeNode):
    """A base cache that is only read, and a buffer of the tokens after its text."""

    base: Any
    block: Any  # arrays [B,P,...]: what the model computed for the tokens after the base's text
    count: Array  # i32[B] how many of the P places are in use, from the first one on
    write: Callable[..., Any] = struct.field(pytree_node=False)  # ``LM.commit`` of the base

    @property
    def length(self) -> Array:
        """i32[B] tokens committed, those of the buffer included."""
        return self.base.length + self.count


@functools.cache
def overlay(model: LM) -> LM:
    """``model`` with ``OverlayCache`` as its cache; the parameters are those of ``model``.

    ``open_on`` makes the cache. ``apply`` reads base, buffer and block; ``commit`` writes to the
    buffer alone, and tokens for which it has no room are not written. Equal models give the same
    functions.
    """
    # Its buffer has all layers, and the block of a part has some; the other functions read a real
    # cache.
    inside = model.inside._replace(part=None, queries=None, extended=None, above=None)
    model = model._replace(init_cache=_no_cache, commit=_commit, inside=inside)
    return model.changed(_apply_of)


def open_on(model: LM, params: Params, base: Any, room: int) -> OverlayCache:
    """The cache of ``overlay(model)`` with an empty buffer of ``room`` places.

    ``base`` is a cache of ``model``: its tokens are the text so far. ``params`` are read for their
    shapes only.
    """
    batch = base.length.shape[0]

    def block() -> Any:
        return model.apply(params, jnp.zeros((batch, 1), jnp.int32), base)[1]

    shapes = tree.shapes(block)
    empty = jax.tree.map(lambda x: jnp.zeros((batch, room, *x.shape[2:]), x.dtype), shapes)
    return OverlayCache(base, empty, jnp.zeros_like(base.length), model.commit)


def settle(cache: OverlayCache, length: Array, kept: Array) -> OverlayCache:
    """The same cache with an empty buffer, whose tokens before a position are in the base.

    ``length`` i32[B]: the tokens of the buffer at positions below it are committed to the base. In
    rows where ``kept`` bool[B] is False none is. The base is written, as ``LM.commit`` does.
    """
    count = jnp.clip(length - cache.base.length, 0, cache.count)
    base = cache.write(cache.base, cache.block, jnp.where(kept, count, 0))
    return cache.replace(base=base, count=jnp.zeros_like(cache.count))


def settle_all(state: Any, depth: int, length: Array, kept: Array) -> Any:
    """A pytree in which every overlay that is the ``depth``-th on its real cache is settled."""

    def one(part: Any) -> Any:
        if not is_overlay(part) or depth_of(part) < depth:
            return part
        if depth_of(part) > depth:
            return part.replace(base=one(part.base))
        return settle(part, length, kept)

    return jax.tree.map(one, state, is_leaf=is_overlay)


def depth_of(cache: Any) -> int:
    """How many overlays are on the real cache; 0: this is the real one."""
    return 1 + depth_of(cache.base) if is_overlay(cache) else 0


def is_overlay(part: Any) -> bool:
    """Whether a part of a pytree is an ``OverlayCache``; for ``is_leaf``."""
    return isinstance(part, OverlayCache)


def _no_cache(batch: int, slots: int) -> Any:
    raise TypeError("an overlay continues the text of another cache; open_on makes it")


def _apply_of(apply: Callable) -> Callable:
    def over_base(params, tokens, cache, layout=None, block=None):
        own = cache.block if block is None else tree.join(cache.block, block)
        batch, new = tokens.shape
        room = jax.tree.leaves(cache.block)[0].shape[1]
        if layout is None:
            layout = tree.chain_layout(batch, new, jax.tree.leaves(own)[0].shape[1] - room)
        return apply(params, tokens, cache.base, _after_buffer(cache, room, layout), own)

    return over_base


def _after_buffer(cache: OverlayCache, room: int, layout: Layout) -> Layout:
    """The layout of a block whose first ``room`` places are the buffer.

    Every token attends to the places in use; positions are counted from the end of the base's text.
    """
    batch, new = layout.visible.shape[:2]
    place = jnp.arange(room)
    used = place < cache.count[:, None]
    visible = jnp.broadcast_to(used[:, None], (batch, new, room))
    before = jnp.broadcast_to(place, (batch, room))
    after = layout.depth + cache.count[:, None]
    visible = jnp.concatenate([visible, layout.visible], -1)
    return Layout(visible, jnp.concatenate([before.astype(after.dtype), after], -1))


def _commit(
    cache: OverlayCache, block: Any, count: Array, path: Array | None = None
) -> OverlayCache:
    """``LM.commit``: puts the accepted tokens of the block into the buffer."""
    room = jax.tree.leaves(cache.block)[0].shape[1]
    # What was computed for a rejected token, possibly NaN, is never in the buffer.
    new, inside = tree.accepted(block, count, path)
    place = jnp.where(inside, cache.count[:, None] + jnp.arange(inside.shape[1]), room)

    def put(buffer: Array, part: Array) -> Array:
        write = jax.vmap(lambda row, values, at: row.at[at].set(values, mode="drop"))
        return write(buffer, part.astype(buffer.dtype), place)

    return cache.replace(block=jax.tree.map(put, cache.block, new), count=cache.count + count)
