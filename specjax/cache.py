"""The cache of the committed text: keys and values or a state per layer, and a length per row.

A layer with a sliding window of W positions has at most W slots. If the text is longer, they are a
ring: position p is in slot p mod W, and replaces position p - W, which no later token attends to.

A model reads the cache and returns the keys and values of the tokens that it was fed, a
``KVBlock``. ``commit`` writes those of the accepted tokens; nothing else writes to the cache.

A recurrent layer has a ``RecurrentState`` of constant size, which nothing can take a token out of
again. Its part of a block are ``Updates``: what each token adds to the state that is before it on
its path. So a node of a tree costs as much memory as its keys and values, not a state, and
``commit`` computes the state after the accepted path from the one before the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree

Windows = tuple[int | None, ...]  # of each layer the sliding window, None: it has none


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer. Slots beyond the length have no meaning."""

    # [B,H,S,D] each (H = key/value heads). Heads come first, so that attention needs no transpose.
    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array  # i32[B]
    # The sliding windows; (): no layer has one. Static.
    windows: Windows = struct.field(pytree_node=False, default=())
    # i32[B], in a sparse view: the first slots that are in use of each layer without a window, in
    # any order; new tokens still have positions from ``length`` on. None: ``length``.
    held: jax.Array | None = None
    # i32[B] the first slots, which decoders do not attend to: a source, or earlier documents. None:
    # none.
    source: jax.Array | None = None


class KVBlock(struct.PyTreeNode):
    """Keys and values of P tokens that are not committed."""

    k: tuple[jax.Array, ...]  # [B,P,H,D] each
    v: tuple[jax.Array, ...]
    # f32[B,P] one number of the output at each token. It depends on all reads of the cache that led
    # to this block: see ``write_after``.
    output: jax.Array

    @property
    def size(self) -> int:
        """P."""
        return self.output.shape[1]


class GrownBlock(struct.PyTreeNode):
    """A block whose first P tokens are stored as the slots of a cache: a pass reads them in place.

    All of them must be finite: a weight of 0 does not remove NaN, and nothing else does here.
    """

    k: tuple[jax.Array, ...]  # [B,H,P,D] each
    v: tuple[jax.Array, ...]
    rest: KVBlock | None = None  # the tokens after them

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.k[0].shape[2] + (0 if self.rest is None else self.rest.size)

    def join(self, part: KVBlock) -> GrownBlock:
        """The block with the tokens of ``part`` after its own."""
        return self.replace(rest=part if self.rest is None else tree.join(self.rest, part))

    def put(self, part: KVBlock, at: jax.Array) -> GrownBlock:
        """The first tokens with those of ``part`` at the places from ``at`` i32[B] or i32[] on."""
        # With 64-bit types enabled, all indices of an update must have one type.
        at = at.astype(jnp.result_type(int))
        k = tuple(write(*each, at) for each in zip(self.k, part.k, strict=True))
        v = tuple(write(*each, at) for each in zip(self.v, part.v, strict=True))
        return GrownBlock(k, v)


class RecurrentState(struct.PyTreeNode):
    """What a recurrent layer keeps of the committed text; zeros for an empty one."""

    memory: jax.Array  # f32[B,H,K,V], float64 in exactness tests
    window: jax.Array  # [B,W-1,C] the newest inputs of its convolution


class Updates(struct.PyTreeNode):
    """What P tokens that are not committed do to the state of a recurrent layer.

    A token with the state S before it on its path leaves exp(decay) S + key value^T. The value is
    what the delta rule writes, after what S had at the key was taken off: it depends on the path.
    """

    keys: jax.Array  # f32[B,P,G,K] H is a multiple of G
    values: jax.Array  # f32[B,P,H,V]
    decay: jax.Array  # f32[B,P,H] at most 0
    inputs: jax.Array  # [B,P,C] of the convolution


class MixedCache(struct.PyTreeNode):
    """The cache of a decoder with recurrent layers, and perhaps some with attention."""

    attention: KVCache  # of the layers with attention, in order
    states: tuple[RecurrentState, ...]  # of the recurrent layers, in order
    recurrent: tuple[bool, ...] = struct.field(pytree_node=False)  # for each layer

    @property
    def length(self) -> jax.Array:
        """i32[B] tokens committed."""
        return self.attention.length


class MixedBlock(struct.PyTreeNode):
    """P tokens that are not committed, of a decoder with recurrent layers."""

    attention: KVBlock  # of the layers with attention
    updates: tuple[Updates, ...]
    recurrent: tuple[bool, ...] = struct.field(pytree_node=False)  # for each layer

    @property
    def output(self) -> jax.Array:
        """f32[B,P]: that of ``KVBlock``."""
        return self.attention.output

    @property
    def size(self) -> int:
        """P."""
        return self.attention.size


class Queries(struct.PyTreeNode):
    """The queries of T tokens in one layer, of Q heads; Q is a multiple of the key heads."""

    # f32[B,T,Q,D] rotated, and divided as the scores are: a score is their product with a key.
    q: jax.Array
    softcap: float | None = struct.field(pytree_node=False, default=None)  # c tanh(score / c)


def zeros(
    layers: int, batch: int, heads: int, slots: int, width: int, dtype, windows: Windows = ()
) -> KVCache:
    """An empty cache for texts of ``slots`` tokens; ``windows`` as in ``KVCache``."""
    every = windows or (None,) * layers
    sizes = [slots if window is None else min(slots, window) for window in every]
    k, v = (tuple(jnp.zeros((batch, heads, own, width), dtype) for own in sizes) for _ in range(2))
    return KVCache(k, v, jnp.zeros((batch,), jnp.int32), windows)


def block_of(layers: Sequence[tuple[jax.Array, jax.Array] | Updates], output: jax.Array) -> Any:
    """The block with these layers, each (keys, values) or ``Updates``; output f32[B,P]."""
    recurrent = tuple(isinstance(layer, Updates) for layer in layers)
    pairs: Any = [layer for layer in layers if not isinstance(layer, Updates)]
    k, v = zip(*pairs, strict=True) if pairs else ((), ())
    block = KVBlock(k, v, output)
    if not any(recurrent):
        return block
    return MixedBlock(block, tuple(x for x in layers if isinstance(x, Updates)), recurrent)


def layers_of(block: KVBlock | MixedBlock) -> list[tuple[jax.Array, jax.Array] | Updates]:
    """The layers of a block; the inverse of ``block_of``."""
    if isinstance(block, KVBlock):
        return list(zip(block.k, block.v, strict=True))
    pairs, updates = iter(layers_of(block.attention)), iter(block.updates)
    return [next(updates if own else pairs) for own in block.recurrent]


def select(cache: Any, layers: tuple[int, ...]) -> Any:
    """The same cache with only these layers; nothing is copied."""
    if isinstance(cache, MixedCache):
        own = [sum(cache.recurrent[:layer]) for layer in layers if cache.recurrent[layer]]
        rest = [layer for layer in layers if not cache.recurrent[layer]]
        rest = tuple(layer - sum(cache.recurrent[:layer]) for layer in rest)
        attention, states = select(cache.attention, rest), tuple(cache.states[i] for i in own)
        recurrent = tuple(cache.recurrent[layer] for layer in layers)
        return MixedCache(attention, states, recurrent) if own else attention
    parts = (cache.k, cache.v, cache.windows)
    k, v, windows = (tuple(part[layer] for layer in layers) if part else () for part in parts)
    return cache.replace(k=k, v=v, windows=windows)


def newest(length: jax.Array, slots: int) -> jax.Array:
    """i32[B,S]: the newest committed position of each slot of a ring; negative: none.

    A ring that is longer than the text has position s in slot s, as a cache without a window.
    """
    last = length[:, None] - 1
    return last - (last - jnp.arange(slots)) % slots


def write(buffer: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Puts ``new`` [B,M,H,D] at slots ``start[b] + i`` of ``buffer`` [B,H,S,D].

    The buffer must have room for M slots from ``start[b]`` on; ``start`` without axes is that of
    all rows.
    """
    new = new.swapaxes(1, 2).astype(buffer.dtype)
    if buffer.shape[0] == 1 or not start.ndim:
        return jax.lax.dynamic_update_slice(buffer, new, (0, 0, start.reshape(-1)[0], 0))
    put = jax.vmap(lambda row, block, at: jax.lax.dynamic_update_slice(row, block, (0, at, 0)))
    return put(buffer, new, start)


def write_ring(buffer: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Puts the first count[b] of ``new`` [B,M,H,D] into the ring ``buffer`` [B,H,S,D].

    Their positions are start[b] + i. No other slot is changed: it may hold a position that later
    tokens attend to.
    """
    size, slots = new.shape[1], buffer.shape[2]
    place = jnp.arange(size)
    # Of several tokens for one slot only the last is written.
    kept = (place < count[:, None]) & (place >= count[:, None] - slots)
    # A slot outside of the ring is not written.
    slot = jnp.where(kept, (start[:, None] + place) % slots, slots)
    return write_at(buffer, new.swapaxes(1, 2).astype(buffer.dtype), slot)


def write_at(buffer: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """``buffer`` [B,H,S,D] with ``new`` [B,H,M,D] at ``slots`` i32[B,M]; S: not written."""
    put = jax.vmap(lambda row, block, at: row.at[:, at].set(block, mode="drop"))
    return put(buffer, new, slots)


def write_after(start: jax.Array, output: jax.Array) -> jax.Array:
    """``start`` i32[B], in a form that depends on ``output`` f32[B,M].

    XLA:CPU copies a whole buffer that is both read and written unless the write depends on the data
    that was read (``optimization_barrier`` does not prevent the copy). The sum differs from
    ``start`` only in rows with NaN, which have failed already.
    """
    return start + jnp.isnan(output).any(-1).astype(start.dtype)


def commit(cache: Any, block: Any, count: jax.Array, path: jax.Array | None = None) -> Any:
    """Appends the tokens at ``path[:count]`` of a block to the committed text.

    ``count`` and ``path`` as in ``tree.accepted``. Zeros are written beyond ``count``: what a model
    computed for a rejected token, possibly NaN, is never in the cache. A state moves along the path
    alone, and stays the same, bit for bit, in a row with count 0.
    """
    kept, _ = tree.accepted(block, count, path)
    if isinstance(cache, MixedCache):
        pairs = zip(cache.states, kept.updates, strict=True)
        states = tuple(advanced(*pair, count) for pair in pairs)
        attention = commit(cache.attention, kept.attention, count)
        return cache.replace(attention=attention, states=states)
    # With 64-bit types enabled (exactness tests), all indices of an update must have one type.
    start = write_after(cache.length, kept.output).astype(jnp.result_type(int))

    def put(buffer: jax.Array, new: jax.Array, window: int | None) -> jax.Array:
        # A buffer of fewer slots than the window has room for the whole text.
        if window is not None and buffer.shape[2] == window:
            return write_ring(buffer, new, start, count)
        return write(buffer, new, start)

    windows = cache.windows or (None,) * len(cache.k)
    return cache.replace(
        k=tuple(put(*each) for each in zip(cache.k, kept.k, windows, strict=True)),
        v=tuple(put(*each) for each in zip(cache.v, kept.v, windows, strict=True)),
        length=cache.length + count,
    )


# Products with a state: no backend may round its factors to fewer bits.
EXACT = jax.lax.Precision.HIGHEST


def advanced(state: RecurrentState, kept: Updates, count: jax.Array) -> RecurrentState:
    """The state after the first ``count`` i32[B] of M tokens; ``kept`` is zero beyond them.

    By the recurrence written out: the old state decays by all tokens, and what a token wrote by
    those after it. One product for all tokens, without a state for each.
    """
    later = jnp.pad(kept.decay[:, 1:], ((0, 0), (0, 1), (0, 0)))
    later = jnp.exp(jax.lax.cumsum(later, 1, reverse=True))
    groups = kept.keys.shape[2]
    values = kept.values * later[..., None]
    values = values.reshape(*values.shape[:2], groups, -1, values.shape[-1])
    added = jnp.einsum("bmgk,bmgrv->bgrkv", kept.keys, values, precision=EXACT)
    left = jnp.exp(kept.decay.sum(1))[..., None, None]
    memory = left * state.memory + added.reshape(state.memory.shape)
    inputs = jnp.concatenate([state.window, kept.inputs.astype(state.window.dtype)], 1)
    slide = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, state.window.shape[1]))
    return RecurrentState(memory.astype(state.memory.dtype), slide(inputs, count))
