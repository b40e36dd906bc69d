"""One more decoder layer over the target's features, in the place of embeddings, with a cache of its own (Hydra++).

The feature of the token at position t sits at rotary position t. Parameters are those of a layer of ``models.transformer`` and,
under "norm", of the norm behind it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax import tree
from specjax.errors import UserError
from specjax.models.hf_config import _value
from specjax.models.transformer import Block, Norm, TransformerConfig, rope_frequencies
from specjax.types import Params

THETA, EPS = 10000.0, 1e-6  # of transformers' Llama, where a config.json is silent
WIDEST = 64  # of the attention heads of a new layer
CHUNK = 256  # features of a prompt that attend at once, as the target's own prefill has it


class Prefix(NamedTuple):
    """A causal map of all features so far, with a cache of its own (Hydra++).

    ``init_cache(batch, slots)``; ``apply(params, features [B,T,E], cache, parents) -> ([B,T,E], cache)`` writes and does not
    advance; ``commit(cache, count[B])`` does.
    """

    init_cache: Callable[[int, int], Any]
    apply: Callable[..., tuple[jax.Array, Any]]
    commit: Callable[..., Any]


class Layer(Block):
    """A decoder layer and the norm behind it."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        self.norm = Norm(config, dtype)


def new(width: int, head_dim: int = 0) -> TransformerConfig:
    """The shape of a new layer: Llama's, with as many key heads as query heads, ``head_dim`` wide (0: as fits the width)."""
    head_dim = head_dim or max((d for d in range(2, WIDEST + 1, 2) if width % d == 0), default=2)
    heads = max(width // head_dim, 1)
    return _config(
        width, head_dim, heads, heads, 8 * -(-width // 3)
    )  # 8/3 of the width, as Llama's


def stored(params: Params, config: dict[str, Any], head_dim: int = 0) -> TransformerConfig:
    """The shape of a layer that there is: sizes from its tensors, the rest from config.json or ``head_dim``.

    Raises UserError for tensors of another kind of layer, and where nothing says how wide its attention heads are.
    """
    if not {"norm", "attention", "mlp"} <= params.keys() or "gate" not in params["mlp"]:
        raise UserError(
            "the prefix layer of these heads is not a Llama layer and its norm; no other can be read"
        )
    width = params["norm"]["scale"].shape[0]
    queries, keys = (params["attention"][name]["kernel"].shape[1] for name in ("q", "k"))
    told = head_dim
    if config.get("head_dim") or config.get("num_attention_heads"):
        told = _value(
            config, "head_dim", int, queries // _value(config, "num_attention_heads", int, 1)
        )
    if head_dim not in (0, told):
        raise UserError(
            f"head_dim is {head_dim}, and the heads in the files have {told}; leave it out"
        )
    if not told:
        raise UserError(
            "these heads do not say how wide an attention head of their prefix layer is; give head_dim"
        )
    if queries % told or keys % told or queries % keys:
        raise UserError(
            f"head_dim is {told}, and the prefix layer has queries of {queries} and keys of {keys} altogether"
        )
    found = dataclasses.replace(
        _config(width, told, queries // told, keys // told, params["mlp"]["up"]["kernel"].shape[1]),
        rope_theta=_value(config, "rope_theta", float, THETA),
        norm_eps=_value(config, "rms_norm_eps", float, EPS),
        attention_bias="bias" in params["attention"]["q"],
        mlp_bias="bias" in params["mlp"]["up"],
    )
    right = nnx.to_pure_dict(_abstract(found, jnp.dtype(jnp.float32))[1])
    if jax.tree.map(jnp.shape, right) != jax.tree.map(jnp.shape, params):
        raise UserError(
            "the prefix layer of these heads is not a Llama layer and its norm; no other can be read"
        )
    return found


def facts(config: TransformerConfig) -> dict[str, Any]:
    """What config.json must say of a layer, for its tensors do not."""
    return {
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
    }


def start(config: TransformerConfig, key: jax.Array) -> Params:
    """Fresh parameters. Both residual branches end in zeros: the layer begins as the norm of the feature."""
    layer = Layer(config, jnp.float32, nnx.Rngs(key))
    params = nnx.to_pure_dict(nnx.state(layer))
    for module, name in (("attention", "o"), ("mlp", "down")):
        params[module][name] = jax.tree.map(jnp.zeros_like, params[module][name])
    return params


def build(config: TransformerConfig, dtype=jnp.float32) -> Prefix:
    """The layer as a map of features; ``dtype`` is that of its cache."""

    def init_cache(batch: int, slots: int) -> kv.KVCache:
        return kv.zeros(1, batch, config.num_kv_heads, slots, config.head_dim, dtype)

    def apply(params, features, cache, parents):
        params = params.draft["prefix"]
        graph, state = _abstract(config, jnp.dtype(params["norm"]["scale"].dtype))
        state = jax.tree.map(
            lambda x: x, state
        )  # a state built anew: tracers must not get into the cached one
        nnx.replace_by_pure_dict(state, params)
        layer, (batch, size, _) = nnx.merge(graph, state), features.shape
        position = cache.length[:, None] + tree.depths(parents, batch, size)
        angle = position[..., None].astype(jnp.float32) * rope_frequencies(config)
        mask = tree.visible(cache.length, size, cache.k[0].shape[2], parents)
        x = features.astype(layer.norm.scale.dtype)
        start = cache.length.astype(
            jnp.result_type(int)
        )  # where laws are enumerated, in 64 bits, indices must agree
        x, k, v = layer(x, angle, mask, cache.k[0], cache.v[0], start)
        return layer.norm(x).astype(features.dtype), cache.replace(k=(k,), v=(v,))

    return Prefix(init_cache, apply, kv.commit)


def feed(
    prefix: Prefix, params: Any, features: jax.Array, count: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """The first count[b] features of [B,T,E] through an empty cache, some at a time: what it makes of all T, and the cache."""
    batch, size, width = features.shape

    def block(cache, piece, start):
        out, cache = prefix.apply(params, piece, cache, None)
        return prefix.commit(cache, jnp.clip(count - start, 0, piece.shape[1])), out

    whole, pieces = size // CHUNK * CHUNK, []
    if whole:
        stacked = features[:, :whole].reshape(batch, -1, CHUNK, width).swapaxes(0, 1)
        cache, out = jax.lax.scan(
            lambda cache, xs: block(cache, *xs), cache, (stacked, jnp.arange(0, whole, CHUNK))
        )
        pieces.append(out.swapaxes(0, 1).reshape(batch, whole, width))
    if size > whole:
        cache, out = block(cache, features[:, whole:], whole)
        pieces.append(out)
    return jnp.concatenate(pieces, 1), cache


def _config(width: int, head_dim: int, heads: int, kv_heads: int, inner: int) -> TransformerConfig:
    if head_dim % 2:
        raise UserError(f"head_dim is {head_dim}; rotary positions need an even number")
    # No vocabulary and no end of positions: the layer has neither embeddings nor a table of positions.
    return TransformerConfig(
        "llama", 0, width, inner, 1, heads, kv_heads, head_dim, 0, norm_eps=EPS, rope_theta=THETA
    )


@functools.cache
def _abstract(config: TransformerConfig, dtype) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Layer(config, dtype, nnx.Rngs(0))))
