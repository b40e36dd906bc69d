"""A block drafter as functions: the text as keys and values, and one pass over a block.

A block has the pending token and then masks, at the positions that follow the committed text. Its
places attend to the text before the pending token, and to each other. The same functions draft and
train: in training the text is the cache of every place, filled up to the place.

DFlash (2602.06036, section 3): c = norm(fc(taps of the target)) gives every layer the keys and
values of the committed text; the tokens of the block are embeddings, and run through ordinary
decoder layers that attend to the text and to the block. DFlare (2606.02091): every layer has its
own mixture of the taps, softmax-weighted, and its own projections of it. DFlash 2
(inco.ai/blog/dflash2): short convolutions inside the block, before and after each part of a layer.

All functions take ``Net`` first, and ``params`` is always the pair ``ModelParams``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache
from specjax.drafters.files import Ends
from specjax.drafters.heads import _prefix
from specjax.drafters.heads.block import _corrections as corrections
from specjax.drafters.heads.block._corrections import BlockShape
from specjax.drafters.heads.eagle._network import embed
from specjax.models.attention import Past, past, rope_angle, stored
from specjax.models.layers import Linear, Module, Norm, at_least, linear_options
from specjax.models.transformer import Block
from specjax.tree import Layout
from specjax.types import Array, ModelParams, Params


class _Convolutions(nnx.Module):
    """The kernels of two convolutions over the places of a block, before and after a part.

    The kernels of a place are the same for all blocks and a change that depends on the place's
    input, one number for each group of channels. New ones change nothing.
    """

    def __init__(self, shape: BlockShape, dtype, rngs: nnx.Rngs):
        width, self.taps, self.group = shape.config.hidden_size, shape.conv, shape.conv_group
        self.base = nnx.Param(jnp.zeros((2, self.taps, width), dtype).at[:, 0].set(1))
        kw = linear_options(False, dtype, rngs)
        kw["kernel_init"] = nnx.initializers.zeros_init()
        self.project = Linear(width, 2 * self.taps * (width // self.group), **kw)

    def __call__(self, x: Array) -> Array:
        """[B,F,D] -> [2,B,F,taps,D]."""
        change = self.project(x).reshape(*x.shape[:2], 2, self.taps, -1)
        kernels = self.base[...].astype(x.dtype) + jnp.repeat(change, self.group, -1)
        return jnp.moveaxis(kernels, 2, 0)


def _convolved(x: Array, kernels: Array) -> Array:
    """[B,F,D]: of each place itself and the ones before it in the block, zeros before the first."""
    size, total = x.shape[1], jnp.zeros_like(x)
    for tap in range(kernels.shape[2]):
        before = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, :size]
        total = total + before * kernels[:, :, tap]
    return total


class _Layer(Block):
    """A decoder layer, with its own projections of the committed text or convolutions if asked."""

    def __init__(self, shape: BlockShape, dtype, rngs: nnx.Rngs, layer: int):
        config = shape.config
        super().__init__(config, dtype, rngs, layer)
        if shape.context == "mixed":
            kw = linear_options(config.attention_bias, dtype, rngs)
            width = config.num_kv_heads * config.head_dim
            self.context_k = Linear(config.hidden_size, width, **kw)
            self.context_v = Linear(config.hidden_size, width, **kw)
        if shape.conv:
            self.attention_conv = _Convolutions(shape, dtype, rngs)
            self.mlp_conv = _Convolutions(shape, dtype, rngs)

    def _attended(self, x: Array, angle: Array | None, past: Past, stored: Any):
        if not hasattr(self, "attention_conv"):
            return super()._attended(x, angle, past, stored)
        read = self.attention_norm(x)
        before, after = self.attention_conv(read)
        attended, *own = self.attention(_convolved(read, before), angle, past, stored)
        return _convolved(attended, after), *own

    def _fed(self, read: Array) -> Array:
        if not hasattr(self, "mlp_conv"):
            return super()._fed(read)
        normed = self.mlp_norm(read)
        before, after = self.mlp_conv(normed)
        return _convolved(self.mlp(_convolved(normed, before)), after)

    def read(self, context: Array, angle: Array | None) -> tuple[Array, Array]:
        """[B,T,D] -> keys and values [B,T,H,head_dim] of the committed text."""
        own = self.attention
        maps = (self.context_k, self.context_v) if hasattr(self, "context_k") else (own.k, own.v)
        shape = (*context.shape[:2], own.kv_heads, own.width)
        k, v = (to(context).reshape(shape) for to in maps)
        return own.placed("k", k, angle), v


class BlockNet(nnx.Module):
    """The network without the target's embeddings and head."""

    def __init__(self, shape: BlockShape, dtype, rngs: nnx.Rngs):
        config, count = shape.config, len(shape.taps)
        if shape.context == "mixed":
            self.mix = nnx.Param(jnp.zeros((config.num_layers, count), dtype))
        else:
            kw = linear_options(False, dtype, rngs)
            self.fc = Linear(count * config.hidden_size, config.hidden_size, **kw)
        self.hidden_norm = Norm(config, dtype)
        self.layers = nnx.Dict(
            {str(i): _Layer(shape, dtype, rngs, i) for i in range(config.num_layers)}
        )
        self.norm = Norm(config, dtype)

    def read(self, taps: Array, angle: Array | None) -> tuple[tuple, tuple]:
        """Taps [B,T,n,D] -> the keys and the values of every layer, [B,T,H,head_dim] each."""
        if hasattr(self, "fc"):
            shared = self.hidden_norm(self.fc(taps.reshape(*taps.shape[:-2], -1)))
            contexts = [shared] * len(self.layers)
        else:
            weights = jax.nn.softmax(self.mix[...], -1)
            contexts = list(self.hidden_norm(jnp.einsum("ln,btnd->lbtd", weights, taps)))
        pairs = [self.layers[str(i)].read(each, angle) for i, each in enumerate(contexts)]
        return tuple(zip(*pairs, strict=True))  # pyright: ignore[reportReturnType]

    def __call__(
        self, x: Array, angle: Array | None, views: Sequence[Past], cache: KVCache
    ) -> Array:
        """[B,F,D] -> [B,F,D]; the text is in ``cache``, and each layer has a view of it."""
        for index, view in enumerate(views):
            x, _, _ = self.layers[str(index)](x, angle, view, stored(cache, None, index))
        return self.norm(x)


MODULE = Module(BlockNet)


class Net(NamedTuple):
    """The static facts."""

    shape: BlockShape
    ends: Ends
    dtype: Any  # of parameters, activations and cache
    ids: np.ndarray | None = None  # i32[V_d] the token of each logit; None: all tokens


def init_cache(net: Net, batch: int, slots: int) -> KVCache:
    """An empty cache of the committed text."""
    config = net.shape.config
    return _prefix.init_cache(config, net.dtype, config.num_layers, batch, slots, config.windows)


def read(net: Net, params: ModelParams, taps: tuple[Array, ...], positions: Array) -> KVBlock:
    """The keys and values of T tokens of the text, from their taps [B,T,D] each.

    ``positions`` i32[B,T].
    """
    angle = rope_angle(net.shape.config, positions)
    stacked = jnp.stack(taps, -2).astype(at_least(net.dtype, params.draft))
    k, v = _merge(net, params).read(stacked, angle)
    return KVBlock(k, v, v[-1][..., 0, 0].astype(jnp.float32))


def draft(net: Net, params: ModelParams, pending: Array, tokens: int, cache: KVCache) -> Array:
    """[B,F,D]: the outputs of a block of K tokens after ``pending`` i32[B] and the cached text.

    The last K of the F places predict one token each.
    """
    shape, dtype, batch = net.shape, at_least(net.dtype, params.draft), len(pending)
    size = shape.fed(tokens)
    first = embed(net.ends, params, pending)[:, None].astype(dtype)
    if shape.mask_id is None:
        mask = params.draft["mask"]
    else:
        mask = embed(net.ends, params, jnp.asarray(shape.mask_id))
    masks = jnp.broadcast_to(mask.astype(dtype), (batch, size - 1, first.shape[-1]))
    every = jnp.ones((batch, size, size), bool)
    kinds = {}
    for causal in set(shape.causal_layers):
        layout = Layout(
            jnp.tril(every) if causal else every,
            jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size)),
        )
        kinds[causal] = past(cache, size, layout)
    views = [kinds[causal] for causal in shape.causal_layers]
    x, angle = jnp.concatenate([first, masks], 1), rope_angle(shape.config, views[0].positions)
    return _merge(net, params)(x, angle, views, cache)


def along(
    net: Net,
    params: ModelParams,
    text: KVBlock,
    starts: Array,
    pending: Array,
    places: Array,
    tokens: int,
) -> Array:
    """[B,P,F,D]: ``draft`` behind each of the places i32[B,P] of a text.

    ``text`` has the keys and values of its T tokens, and position t is that of token t. ``pending``
    and ``starts`` i32[B,P]: the token after each place, and the first token of its document.
    """
    keys, values = (tuple(x.swapaxes(1, 2) for x in each) for each in (text.k, text.v))

    def behind(place: Array, start: Array, token: Array) -> Array:
        cache = KVCache(keys, values, place + 1, net.shape.config.windows, source=start)
        return draft(net, params, token, tokens, cache)

    return jax.vmap(behind, 1, 1)(places, starts, pending)


def correct(
    net: Net, params: ModelParams, state: Array, given: corrections.Given
) -> corrections.Corrected:
    """One depth of the draft, see ``_corrections.step``."""
    return corrections.step(net.shape, Bound(embed, net.ends), params, state, given)


def first_state(net: Net, params: ModelParams, outputs: Array, token: Array) -> Array:
    """[...,S]: the state of a correction before the first token of blocks with these outputs.

    ``outputs`` [...,F,D], ``token`` i32[...] before the pending one.
    """
    # A correction without a state carries one number that it does not read.
    width = max(corrections.state_width(net.shape), 1)
    state = jnp.zeros((*token.shape, width), at_least(net.dtype, params.draft))
    return corrections.begin(net.shape, params, state, outputs, token)


def start(shape: BlockShape, target_params: Params, key: Array) -> Params:
    """New parameters; none of them is the target's."""
    keys = jax.random.split(key, 3)
    params = MODULE.new(shape, keys[0]) | corrections.new(shape, keys[1])
    if shape.mask_id is None:
        width = shape.config.hidden_size
        params["mask"] = 0.02 * jax.random.normal(keys[2], (width,), jnp.float32)
    return params


def _merge(net: Net, params: ModelParams) -> BlockNet:
    return MODULE.merge(net.shape, params.draft, net.dtype)
