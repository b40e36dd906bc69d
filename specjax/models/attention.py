"""Attention over a cache and a block.

Sources: grouped-query attention (2305.13245), sliding windows (2004.05150), norms of queries and
keys (2302.05442), soft caps (Gemma 2, 2408.00118).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as cache_lib
from specjax import tree
from specjax.cache import GrownBlock, MixedCache
from specjax.models import rope
from specjax.models.layers import Linear, Norm, capped, linear_options
from specjax.models.recurrent import Before
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Columns, Layout


def rope_angle(config: TransformerConfig, positions: jax.Array) -> jax.Array | None:
    """f32[B,T,D/2]: the rotary angles of layer 0 at ``positions`` i32[B,T]; None if it has none."""
    own = config.rope(0)
    return None if own is None else rope.angle(own, positions)


FEW = 16


class Past(NamedTuple):
    """What a block of T tokens attends to: committed slots, and P tokens of the block."""

    length: jax.Array  # i32[B] committed slots
    layout: Layout | Columns
    held: jax.Array | None = None  # i32[B] slots in use of layers without a window; None: length
    source: jax.Array | None = None  # of ``KVCache``
    # i32[B,T,W-1] for recurrent layers: ``recurrent.places``. None: the block is a chain.
    places: jax.Array | None = None

    @property
    def positions(self) -> jax.Array:
        """i32[B,T]: the positions of the T tokens in the text."""
        new = self.layout.visible.shape[1]
        return self.length[:, None] + self.layout.depth[:, self.layout.depth.shape[1] - new :]


class Stored(NamedTuple):
    """Keys and values of one layer that exist before its block is fed."""

    k_cache: jax.Array  # [B,H,S,D]
    v_cache: jax.Array
    k_fed: jax.Array | None = None  # [B,n,H,D] the tokens of the block that were fed before
    v_fed: jax.Array | None = None
    k_grown: jax.Array | None = None  # [B,H,P-n-T,D] those before them, of a ``GrownBlock``
    v_grown: jax.Array | None = None

    def block_with(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B,H,n+T,D]: keys and values of the block, whose newest are [B,T,H,D]."""
        if self.k_fed is not None and self.v_fed is not None:
            k, v = jnp.concatenate([self.k_fed, k], 1), jnp.concatenate([self.v_fed, v], 1)
        return k.swapaxes(1, 2), v.swapaxes(1, 2)


def past(cache: Any, new: int, layout: Layout | Columns | None, fed: int = 0) -> Past:
    """The view of ``new`` tokens after a cache and ``fed`` tokens of their block."""
    if layout is None:
        layout = tree.chain_layout(cache.length.shape[0], new, fed)
    cache = cache.attention if isinstance(cache, MixedCache) else cache
    return Past(cache.length, layout, cache.held, cache.source)


def stored(cache: Any, block: Any, layer: int) -> Any:
    """What one layer has in the cache and in the block: ``Stored``, or ``recurrent.Before``."""
    if isinstance(cache, MixedCache):
        index = sum(cache.recurrent[:layer])
        if cache.recurrent[layer]:
            return Before(cache.states[index], None if block is None else block.updates[index])
        block = None if block is None else block.attention
        return stored(cache.attention, block, layer - index)
    grown = block if isinstance(block, GrownBlock) else None
    fed = block if grown is None else grown.rest
    arrays: list[Any] = []
    for own in (cache, fed, grown):
        arrays += (None, None) if own is None else (own.k[layer], own.v[layer])
    return Stored(*arrays)


class Scores(NamedTuple):
    """How products of queries and keys become scores; static."""

    divisor: float
    softcap: float | None = None
    window: int | None = None  # a token attends to those less than this far before it; None: all

    def of(self, products: jax.Array) -> jax.Array:
        """The scores, without a mask."""
        return capped(products / self.divisor, self.softcap)


class Attention(nnx.Module):
    """Grouped-query attention over a cache and a block.

    ``read`` is the width of its input; None: the hidden size, the width of its output. ``layer`` is
    its number in the decoder.
    """

    def __init__(
        self, config: TransformerConfig, dtype, rngs: nnx.Rngs, read: int | None = None, layer=0
    ):
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.width, self.rope = config.head_dim, config.rope(layer)
        divisor = math.sqrt(config.query_scalar or config.head_dim)
        self.scores = Scores(divisor, config.attention_softcap, config.window(layer))
        kw = linear_options(config.attention_bias, dtype, rngs)
        read = config.hidden_size if read is None else read
        self.q = Linear(read, self.heads * self.width, **kw)
        self.k, self.v = (Linear(read, self.kv_heads * self.width, **kw) for _ in range(2))
        bias = config.attention_bias if config.output_bias is None else config.output_bias
        own = linear_options(bias, dtype, rngs)
        self.o = Linear(self.heads * self.width, config.hidden_size, **own)
        self.gated = config.attention_gate
        if self.gated:
            self.gate = Linear(read, self.heads * self.width, **kw)
        self.qk_norm = ("whole" if config.qk_norm_whole else "head") if config.qk_norm else "none"
        if config.qk_norm:
            heads = (self.heads, self.kv_heads) if config.qk_norm_whole else (1, 1)
            self.q_norm, self.k_norm = (Norm(config, dtype, n * self.width) for n in heads)

    def __call__(self, x, angle, past: Past, stored: Stored):
        """x [B,T,read] -> ([B,T,E], keys and values of the T tokens [B,T,H,D]).

        ``angle`` f32[B,T,D/2] is that of ``rope.angle``; it is not read without rotary positions.
        """
        batch, size, _ = x.shape
        split = [self._split(kind, x) for kind in "qkv"]
        q, k, v = (self.placed(*each, angle) for each in zip("qkv", split, strict=True))
        group = self.heads // self.kv_heads
        # [B,T,K*G,D] -> [B,K,G*T,D]: one matrix product per key head for all queries of its group.
        q = q.reshape(batch, size, self.kv_heads, group, self.width).transpose(0, 2, 3, 1, 4)
        q = q.reshape(batch, self.kv_heads, group * size, self.width)
        keys, values = stored.block_with(k, v)
        if isinstance(past.layout, Columns):
            out = _attend_in_columns(q, self.scores, past.layout.visible, keys, values)
        else:
            out = attend(q, self.scores, past, stored, keys, values)
        out = out.reshape(batch, self.kv_heads, group, size, self.width).transpose(0, 3, 1, 2, 4)
        out = out.reshape(batch, size, -1)
        return self.o(out * jax.nn.sigmoid(self.gate(x)) if self.gated else out), k, v

    def part(self, kind: str, x: jax.Array, angle: jax.Array | None) -> jax.Array:
        """x [B,T,read] -> [B,T,heads,D]: its queries ("q"), keys ("k") or values ("v").

        ``angle`` is that of ``__call__``.
        """
        return self.placed(kind, self._split(kind, x), angle)

    def _split(self, kind: str, x: jax.Array) -> jax.Array:
        """[B,T,heads,D]: the linear map, after the norm of all heads together if there is one."""
        made = getattr(self, kind)(x)
        if kind != "v" and self.qk_norm == "whole":
            made = getattr(self, f"{kind}_norm")(made)
        return made.reshape(*x.shape[:2], -1, self.width)

    def placed(self, kind: str, heads: jax.Array, angle: jax.Array | None) -> jax.Array:
        """The heads after the norm of each, rotated to their positions."""
        if kind != "v" and self.qk_norm == "head":
            heads = getattr(self, f"{kind}_norm")(heads)
        if kind == "v" or self.rope is None or angle is None:
            return heads
        return rope.rotate(heads, angle, self.rope)


def attend(
    q: jax.Array,
    scores: Scores,
    past: Past,
    stored: Stored,
    keys: jax.Array,
    values: jax.Array,
    biases: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Attention of queries [B,K,G*T,D] over the committed slots and the block.

    Keys and values [B,K,n+T,D] are those of ``Stored.block_with``. ``biases`` are added to the
    scores: those of the block [B,K,T,P], and of the slots [B,K,T,S].
    """
    (batch, heads, rows, _), slots = q.shape, stored.k_cache.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    visible = _visible(past, slots, scores.window)
    size = visible.shape[1]

    def score(keys: jax.Array, mask: jax.Array, bias: jax.Array | None) -> jax.Array:
        keys = keys.astype(q.dtype)
        product = jnp.einsum("bkqd,bksd->bkqs", q, keys, preferred_element_type=wide)
        product = scores.of(product.reshape(batch, heads, rows // size, size, -1))
        product = product if bias is None else product + bias[:, :, None]
        return jnp.where(mask[:, None, None], product, jnp.finfo(product.dtype).min)

    def weigh(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights that are not normalised, [B,K,G*T,S], and their sums."""
        weights = jnp.exp(scores - peak)
        return weights.astype(q.dtype).reshape(batch, heads, rows, -1), weights.sum(-1)

    # One softmax over all parts, without a copy of the scores.
    own, before = (None, None) if biases is None else biases
    grown = visible.shape[2] - keys.shape[2]
    new = visible[:, :, grown:]
    parts = [score(keys, new, None if own is None else own[..., grown:])]
    further = []
    if stored.k_grown is not None:
        bias = None if own is None else own[..., :grown]
        parts.append(score(stored.k_grown, visible[:, :, :grown], bias))
        further.append(stored.v_grown)
    if slots:
        parts.append(score(stored.k_cache, _committed(past, slots, scores.window), before))
        further.append(stored.v_cache)
    peaks = [part.max(-1, keepdims=True) for part in parts]
    peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, peaks))
    weights, total = weigh(parts[0])
    out = _block_values(weights, new, values.astype(q.dtype))
    for part, each in zip(parts[1:], further, strict=True):
        weights, more = weigh(part)
        out, total = out + _weighted(weights, each.astype(q.dtype)), total + more
    return (out / total.reshape(batch, heads, rows, 1)).astype(q.dtype)


def _short(past: Past, slots: int, window: int) -> bool:
    """Whether no token can be as far as the window from another; static."""
    return slots + past.layout.visible.shape[2] <= window


def _visible(past: Past, slots: int, window: int | None) -> jax.Array:
    """bool[B,T,P]: which tokens of the block T tokens attend to."""
    visible, depth = past.layout.visible, past.layout.depth
    if window is None or _short(past, slots, window):
        return visible
    own = depth[:, depth.shape[1] - visible.shape[1] :]
    return visible & (own[:, :, None] - depth[:, None] < window)


def _committed(past: Past, slots: int, window: int | None) -> jax.Array:
    """bool[B,1 or T,S]: which slots T tokens attend to; they may be a ring (``cache.commit``)."""
    if window is None or _short(past, slots, window):
        used = past.length if past.held is None or window is not None else past.held
        position = jnp.arange(slots)
        inside = position < used[:, None, None]
    else:
        position = cache_lib.newest(past.length, slots)[:, None]
        inside = (position >= 0) & (past.positions[:, :, None] - position < window)
    if past.source is None:
        return inside
    return inside & (position >= past.source[:, None, None])


def _block_values(weights: jax.Array, visible: jax.Array, values: jax.Array) -> jax.Array:
    """The sum of the block's values [B,K,P,D] with weights [B,K,G*T,P], in float32 at least.

    A token may have values that are not finite; only tokens that attend to it may get NaN. Its
    weight elsewhere is 0, but 0 * NaN is NaN.
    """
    size, wide = visible.shape[1], jnp.promote_types(values.dtype, jnp.float32)
    if size == 1 and values.shape[2] == 1:
        return weights.astype(wide) * values.astype(wide)
    # For few tokens one small loop is faster than a product and its guards.
    if values.shape[2] <= FEW:
        seen = jnp.tile(visible, (1, weights.shape[2] // size, 1))[:, None, :, :, None]
        products = weights[..., None].astype(wide) * values[:, :, None].astype(wide)
        return jnp.where(seen, products, 0).sum(3)
    finite = jnp.isfinite(values)
    out = _weighted(weights, jnp.where(finite, values, 0))
    reaches = (visible & ~finite.all((1, 3))[:, None]).any(-1)  # bool[B,T]
    reaches = jnp.tile(reaches, (1, weights.shape[2] // size))[:, None, :, None]
    return jnp.where(reaches, jnp.nan, out)


def _weighted(weights: jax.Array, values: jax.Array) -> jax.Array:
    """The sum of values [B,K,S,D] with weights [B,K,Q,S], in float32 at least."""
    wide = jnp.promote_types(values.dtype, jnp.float32)
    return jnp.einsum("bkqs,bksd->bkqd", weights, values, preferred_element_type=wide)


def _attend_in_columns(
    q: jax.Array, rule: Scores, visible: jax.Array, keys: jax.Array, values: jax.Array
) -> jax.Array:
    """Attention of queries [B,K,G*P,D] in the layout ``Columns`` of steps after a text.

    Keys and values [B,K,T+j*P,D] are those of the text and of j steps. The scores of a step are
    one number per query, so no array is larger than the scores of the text. There is no guard for
    values that are not finite, and no window: no draft network has one.
    """
    batch, heads, rows, width = q.shape
    size, before = visible.shape[1:]
    text, *steps = _parts(keys, before, size)
    text_values, *step_values = _parts(values.astype(q.dtype), before, size)
    scores = jnp.einsum("bkqd,bksd->bkqs", q, text, preferred_element_type=jnp.float32)
    wide = scores.dtype
    scores = rule.of(scores.reshape(batch, heads, -1, size, before))
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(wide).min)
    query = q.reshape(batch, heads, -1, size, width).astype(wide)
    own = [rule.of((query * key[:, :, None].astype(wide)).sum(-1)) for key in steps]
    peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, [scores.max(-1), *own]))
    weights, own = jnp.exp(scores - peak[..., None]), [jnp.exp(each - peak) for each in own]
    total = functools.reduce(jnp.add, [weights.sum(-1), *own])[..., None]
    weights = weights.astype(q.dtype).reshape(batch, heads, rows, before)
    out = jnp.einsum("bkqs,bksd->bkqd", weights, text_values).reshape(query.shape)
    for weight, value in zip(own, step_values, strict=True):
        out = out + weight[..., None] * value[:, :, None]
    return (out / total).astype(q.dtype).reshape(q.shape)


def _parts(x: jax.Array, first: int, size: int) -> list[jax.Array]:
    """[B,K,first+n*size,D] -> an array [B,K,first,D] and n arrays [B,K,size,D]."""
    starts = range(first, x.shape[2], size)
    return [x[:, :, :first], *(x[:, :, start : start + size] for start in starts)]
