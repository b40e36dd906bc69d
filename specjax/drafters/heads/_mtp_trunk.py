"""Decoder layers that all read the output of the target's last layer but one: heads of ``mtp``.

They are a ``Prefix`` whose output [B,T,K*E] has the outputs of the K layers side by side: each has
a cache of its own, which holds the committed text with the target's true hidden states.

Parameters: {layers: {"0", "1", ...: a layer of ``models.transformer``}}.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict

from specjax import cache as kv
from specjax.bound import Bound
from specjax.drafters.heads import _eagle_shape, _prefix
from specjax.drafters.heads._given import Given
from specjax.drafters.heads._prefix import Prefix
from specjax.errors import UserError
from specjax.models import rope
from specjax.models.attention import past, stored
from specjax.models.transformer import Block
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Layout
from specjax.types import LM, ModelParams, Params


class TrunkShape(NamedTuple):
    """The static facts of the layers."""

    config: TransformerConfig  # of a decoder with such a layer
    layer: int  # the number of this layer
    heads: int  # K


def last_layer(name: str, target: LM) -> tuple[TransformerConfig, int]:
    """The kind of the target's last layer: (shape of the decoder, number of the layer).

    Of a target that is no decoder of ``specjax.models``: a Llama layer of its width. Raises
    UserError for a target of one layer, or a layer that has experts.
    """
    layers, config = _eagle_shape.layers_of(name, target), target.decoder
    if layers < 2:
        raise UserError(
            f"{name} reads the output of the target's last layer but one, and {target.name} has 1 "
            "layer; take a target of 2 layers or more"
        )
    if config is None:
        return _prefix.new(target.width or 0), 0
    if config.has_experts(layers - 1):
        raise UserError(
            f"{name} has further layers of the kind of the target's last one, which has experts; "
            "such layers are not supported"
        )
    return config, layers - 1


def check(name: str, target: LM, shape: TrunkShape, given: Given) -> None:
    """Raises UserError unless the given parameters and facts are those of such layers."""
    one = flatten_dict(_leaves(shape))
    wanted = {("layers", str(j), *path): x for j in range(shape.heads) for path, x in one.items()}
    _eagle_shape.check_leaves(name, wanted, flatten_dict(given.params))
    # The layers are computed as the target's: files that state something else are of another one.
    for key, own in facts(target, shape):
        stored = given.config.get(key)
        if stored not in (None, own):
            raise UserError(
                f"the files of the {name} heads have {key} {stored!r}, and this target has {own}; "
                "use heads made for this target"
            )


def new(shape: TrunkShape, key: jax.Array) -> Params:
    """Random parameters (normal, standard deviation 0.02), other ones for each head."""
    keys = jax.random.split(key, shape.heads)
    return {"layers": {str(j): _random(shape, each) for j, each in enumerate(keys)}}


def start(shape: TrunkShape, target: LM, target_params: Params, key: jax.Array) -> Params:
    """Parameters to start from beside a trained target: copies of its last layer.

    Of a target that is no decoder of ``specjax.models`` the layers begin as the identity.
    """
    if target.decoder is not None:
        own = target_params["layers"][shape.layer]
        return {"layers": {str(j): jax.tree.map(jnp.asarray, own) for j in range(shape.heads)}}
    params = new(shape, key)
    for layer in params["layers"].values():
        for module, name in (("attention", "o"), ("mlp", "down")):
            layer[module][name] = jax.tree.map(jnp.zeros_like, layer[module][name])
    return params


def build(shape: TrunkShape, dtype: Any) -> Prefix:
    """The layers as a map of hidden states; ``dtype`` is that of their caches."""
    return Prefix(Bound(_init_cache, shape, dtype), Bound(_apply, shape), kv.commit)


def facts(target: LM, shape: TrunkShape) -> tuple[tuple[str, Any], ...]:
    """What config.json must hold about the layers in addition to their tensors."""
    return (*_prefix.facts(shape.config), ("num_hidden_layers", target.layers))


def _init_cache(shape: TrunkShape, dtype: Any, batch: int, slots: int) -> kv.KVCache:
    config, window = shape.config, shape.config.window(shape.layer)
    windows = () if window is None else (window,) * shape.heads
    sizes = shape.heads, batch, config.num_kv_heads, slots, config.head_dim
    return kv.zeros(*sizes, dtype, windows)


def _apply(
    shape: TrunkShape,
    params: ModelParams,
    features: jax.Array,
    cache: kv.KVCache,
    layout: Layout | None = None,
) -> tuple[jax.Array, kv.KVBlock]:
    """[B,T,E] -> ([B,T,K*E] before the target's last norm, keys and values of these tokens)."""
    every = params.draft["layers"]
    dtype = jax.tree.leaves(every)[0].dtype
    view = past(cache, features.shape[1], layout)
    own = shape.config.rope(shape.layer)
    angle = None if own is None else rope.angle(own, view.positions)
    outputs, keys, values = [], [], []
    for head in range(shape.heads):
        layer = _merge(shape, every[str(head)])
        x, k, v = layer(features.astype(dtype), angle, view, stored(cache, None, head))
        outputs.append(x)
        keys.append(k)
        values.append(v)
    # One number that depends on the reads of all layers.
    read = functools.reduce(jnp.add, (x[..., 0].astype(jnp.float32) for x in outputs))
    block = kv.KVBlock(tuple(keys), tuple(values), read)
    return jnp.concatenate(outputs, -1).astype(features.dtype), block


def _random(shape: TrunkShape, key: jax.Array) -> Params:
    layer = Block(shape.config, jnp.float32, nnx.Rngs(key), shape.layer)
    return nnx.to_pure_dict(nnx.state(layer))


@functools.cache
def _abstract(config: TransformerConfig, layer: int, dtype: Any) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Block(config, dtype, nnx.Rngs(0), layer)))


def _leaves(shape: TrunkShape) -> Params:
    """The shapes of one layer, a plain dict of ``jax.ShapeDtypeStruct``."""
    return nnx.to_pure_dict(_abstract(shape.config, shape.layer, jnp.dtype(jnp.float32))[1])


def _merge(shape: TrunkShape, params: Params) -> Block:
    """The layer with these parameters (inside a traced function, free at run time)."""
    dtype = jnp.dtype(jax.tree.leaves(params)[0].dtype)
    graph, state = _abstract(shape.config, shape.layer, dtype)
    # A copy: tracers must not be written into the cached state.
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
