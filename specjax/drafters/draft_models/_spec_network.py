"""Spec-Drafter's network: an encoder, and a decoder that fills a block of masks in one pass.

The decoder reads what was written, from the start token to the pending one, and K masks after it.
All of these attend to each other in both directions and to the source. Each mask has an embedding
of its own, so each has its own query; what it predicts is the token at its place. Positions are
relative, as in the target. Since a token that was written attends to the masks too, nothing of it
can be kept for the next round: only what is computed of the source is.

All functions take ``Net`` first, and ``params`` is always the pair ``ModelParams``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from flax.traverse_util import flatten_dict, unflatten_dict

from specjax.bound import Bound
from specjax.models.attention import Stored
from specjax.models.layers import Module, init
from specjax.models.t5 import T5, DecoderLayer, RelativeBias
from specjax.models.t5_config import T5Config
from specjax.types import Array, ModelParams, Params

# The parts of the target that a new network begins with, where they have the same shapes.
SHARED = ("embed", "source_bias", "source_layers", "source_norm", "head")


class Shape(NamedTuple):
    """The sizes of a network."""

    config: T5Config
    block: int  # K


class Net(NamedTuple):
    """The static facts."""

    shape: Shape
    start: int  # the token with which an output begins
    dtype: Any  # of parameters and activations


class Source(struct.PyTreeNode):
    """What the decoder reads of the sources of a batch."""

    k: tuple[Array, ...]  # [B,H,L,D] of each layer's cross-attention
    v: tuple[Array, ...]
    count: Array  # i32[B] tokens of each source


class SpecNetwork(T5):
    """The network. Its decoder has the layers of T5, and attends in both directions."""

    def __init__(self, shape: Shape, dtype: Any, rngs: nnx.Rngs):
        config = shape.config
        super().__init__(config, dtype, rngs)
        self.bias = RelativeBias(config, dtype, rngs, both_ways=True)
        self.masks = nnx.Param(init()(rngs.params(), (shape.block, config.hidden_size), dtype))

    def fill(
        self, tokens: Array, count: Array, masks: Array, source: Source, remat: bool = False
    ) -> Array:
        """The outputs [B,K,E] at masks with the inputs [B,K,E].

        The masks are after the first ``count`` i32[B] of tokens i32[B,W].
        """
        (batch, width), size = tokens.shape, masks.shape[1]
        place = jnp.broadcast_to(jnp.arange(width), (batch, width))
        position = jnp.concatenate([place, count[:, None] + jnp.arange(size)], 1)
        real = jnp.concatenate([place < count[:, None], jnp.ones((batch, size), bool)], 1)
        bias = self.bias(position[:, :, None] - position[:, None])
        x = jnp.concatenate([self.embedded(tokens), masks], 1)
        for index, layer in enumerate(self.layers):
            # After the last layer the masks alone are read.
            first = width if index == len(self.layers) - 1 else 0
            call = Bound(_both_ways, layer, first)
            before = Stored(source.k[index], source.v[index])
            x = (jax.checkpoint(call) if remat else call)(x, real, bias, before, source.count)
        return self.norm(x)


def _both_ways(
    layer: DecoderLayer, first: int, x: Array, real: Array, bias: Array, read: Stored, count: Array
) -> Array:
    """A layer at all places x [B,T,E] -> [B,T-first,E], of the places from ``first`` on.

    ``read`` are keys and values of ``count`` i32[B] tokens of each source.
    """
    attended = layer.attention.both_ways(layer.attention_norm(x), real, bias, first)
    x = x[:, first:] + attended
    x = x + layer.cross.across(layer.cross_norm(x), read, count)
    return x + layer.mlp(layer.mlp_norm(x))


MODULE = Module(SpecNetwork)


def leaves(shape: Shape) -> dict[tuple[str, ...], Any]:
    """The shapes of the parameters, by their paths."""
    return _named(MODULE.leaves(shape))


def start(net: Net, target_params: Params, key: Array) -> Params:
    """New parameters; the encoder is a copy of the target's if all of its shapes agree.

    The same is true of the embeddings and of the LM head.
    """
    own, theirs = _named(MODULE.new(net.shape, key)), _named(target_params)
    for parts in (("embed",), ("head",), SHARED[1:4]):
        mine = {path: leaf.shape for path, leaf in own.items() if path[0] in parts}
        same = {path: leaf.shape for path, leaf in theirs.items() if path[0] in parts}
        if mine == same:
            own |= {path: theirs[path].astype(own[path].dtype) for path in mine}
    return unflatten_dict(own)


def read(net: Net, params: ModelParams, tokens: Array, remat: bool = False) -> Source:
    """The sources: what is before the first start token of each row of tokens i32[B,L]."""
    begins = tokens == net.start
    size = jnp.full(len(tokens), tokens.shape[1])
    count = jnp.where(begins.any(1), jnp.argmax(begins, 1), size).astype(jnp.int32)
    _, block = _merge(net, params).read(tokens, count, remat)
    k, v = (tuple(each.swapaxes(1, 2) for each in own) for own in (block.k, block.v))
    return Source(k, v, count)


def written(tokens: Array, source: Source, width: int) -> Array:
    """i32[B,width]: the first tokens of the outputs in the texts i32[B,S], start token included."""
    places = source.count[:, None] + jnp.arange(width)
    return jnp.take_along_axis(tokens, places, axis=1, mode="clip")


def logits(
    net: Net,
    params: ModelParams,
    tokens: Array,
    count: Array,
    source: Source,
    answers: Array | None = None,
    given: Array | None = None,
    remat: bool = False,
) -> Array:
    """f[B,K,V]: of the K tokens after the first ``count`` i32[B] of the output tokens i32[B,W].

    Where ``given`` bool[B,K], a mask is replaced by its token, one of ``answers`` i32[B,K].
    ``remat``: recompute each layer in the backward pass.
    """
    module = _merge(net, params)
    masks = module.masks[...]
    masks = jnp.broadcast_to(masks, (len(tokens), *masks.shape))
    if answers is not None and given is not None:
        masks = jnp.where(given[..., None], module.embedded(answers), masks)
    return module.logits(module.fill(tokens, count, masks, source, remat))


def _merge(net: Net, params: ModelParams) -> SpecNetwork:
    return MODULE.merge(net.shape, params.draft, net.dtype)


def _named(params: Params) -> dict[tuple[str, ...], Any]:
    """The leaves by their paths; the numbers of layers are strings, as in the files of heads."""
    return {tuple(map(str, path)): leaf for path, leaf in flatten_dict(params).items()}
