"""A decoder layer over the target's features, in the place of embeddings, with its own cache.

For Hydra++. The feature of the token at position t has rotary position t. Parameters are those of a
layer of ``models.transformer`` and, under "norm", of the norm behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache
from specjax.drafters.files.decoder_layers import EPS, THETA
from specjax.errors import UserError
from specjax.models.attention import past, rope_angle
from specjax.models.attention import stored as stored_at
from specjax.models.hf_config import value_of
from specjax.models.layers import Module
from specjax.models.transformer import Block, Norm
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Layout
from specjax.types import LM, Array, ModelParams, Params

# Largest width of an attention head of a new layer.
WIDEST = 64
# Features of a prompt that are fed at once, as in the target's own prefill.
CHUNK = 256
_NOT_LLAMA = (
    "the prefix layer of these heads is not a Llama layer and its norm; no other can be read"
)


class Prefix(NamedTuple):
    """A causal map of all features up to each one, with its own cache (Hydra++).

    The functions are those of ``types.LM``, with features for tokens: ``apply(params, features
    [B,T,E], cache, layout=None) -> ([B,T,E], block)``. The block is committed by ``cache.commit``.
    """

    init_cache: Callable[[int, int], Any]
    apply: Callable[..., tuple[Array, Any]]


class Layer(Block):
    """A decoder layer and the norm behind it."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        self.norm = Norm(config, dtype)


MODULE = Module(Layer)


def new(
    width: int, target: LM, head_dim: int = 0, heads: int = 0, kv_heads: int = 0, inner: int = 0
) -> TransformerConfig:
    """The shape of a new layer: Llama's, with sizes of the target's layers.

    0: the target's ``head_dim``, and at its width its heads and its inner width (without experts).
    At another width or without a decoder of ``specjax.models``: ``default_head_dim``, so many heads
    that they have the width, the target's number of heads for each key head, and Llama's inner
    width (8/3 of the width, rounded up). Raises UserError.
    """
    like = target.inside.decoder
    group = 1 if like is None else like.num_heads // like.num_kv_heads
    head_dim = head_dim or default_head_dim(width, target)
    if like is not None and like.hidden_size == width:
        heads = heads or (like.num_heads if like.head_dim == head_dim else 0)
        inner = inner or (0 if like.experts else like.intermediate_size)
    heads = heads or max(width // head_dim, 1)
    kv_heads = kv_heads or (heads if heads % group else heads // group)
    if heads % kv_heads:
        raise UserError(
            f"heads is {heads} and kv_heads {kv_heads}; heads must be a multiple of kv_heads"
        )
    return layer(width, head_dim, heads, kv_heads, inner or 8 * -(-width // 3))


def stored(params: Params, config: dict[str, Any], head_dim: int = 0) -> TransformerConfig:
    """The shape of an existing layer: sizes from its tensors, the rest from config.json.

    ``head_dim`` is for files whose config.json does not hold it.

    Raises:
        UserError: tensors of another kind of layer, an unknown or wrong width of attention heads.
    """
    if not {"norm", "attention", "mlp"} <= params.keys() or "gate" not in params["mlp"]:
        raise UserError(_NOT_LLAMA)
    attention, up = params["attention"], params["mlp"]["up"]
    width, inner = params["norm"]["scale"].shape[0], up["kernel"].shape[1]
    result = dataclasses.replace(
        stored_layer("the prefix layer", attention, config, head_dim, width, inner),
        attention_bias="bias" in attention["q"],
        mlp_bias="bias" in up,
    )
    if jax.tree.map(jnp.shape, MODULE.leaves(result)) != jax.tree.map(jnp.shape, params):
        raise UserError(_NOT_LLAMA)
    return result


def stored_layer(
    owner: str, attention: Params, config: dict[str, Any], asked: int, width: int, inner: int
) -> TransformerConfig:
    """The shape of a stored layer of ``owner``, without biases.

    The widths of all queries and all keys are those of ``attention``. The width of one head is in
    config.json, or it is ``asked`` (0: not given). Raises UserError.
    """
    queries, keys = (attention[name]["kernel"].shape[1] for name in ("q", "k"))
    head_dim = asked
    if config.get("head_dim") or config.get("num_attention_heads"):
        default = queries // value_of(config, "num_attention_heads", int, 1)
        head_dim = value_of(config, "head_dim", int, default)
    if asked not in (0, head_dim):
        raise UserError(f"head_dim is {asked}, and the given heads have {head_dim}; leave it out")
    if not head_dim:
        raise UserError(
            f"the tensors do not show the width of {owner}'s attention heads; give head_dim"
        )
    if queries % head_dim or keys % head_dim or queries % keys:
        raise UserError(
            f"head_dim is {head_dim}, and {owner} has queries of {queries} and keys of "
            f"{keys} in total; both must be multiples of head_dim, and queries of keys"
        )
    return dataclasses.replace(
        layer(width, head_dim, queries // head_dim, keys // head_dim, inner),
        rope_theta=value_of(config, "rope_theta", float, THETA),
        norm_eps=value_of(config, "rms_norm_eps", float, EPS),
    )


def default_head_dim(width: int, target: LM) -> int:
    """The target's, if it is even and it is of this width, or divides the width.

    Otherwise the largest even divisor of the width up to ``WIDEST``, or 2.
    """
    like = target.inside.decoder
    fits = like is not None and (like.hidden_size == width or width % like.head_dim == 0)
    if like is not None and fits and like.head_dim % 2 == 0:
        return like.head_dim
    return max((d for d in range(2, WIDEST + 1, 2) if width % d == 0), default=2)


def facts(config: TransformerConfig) -> tuple[tuple[str, Any], ...]:
    """What config.json must hold about a layer in addition to its tensors."""
    return (
        ("head_dim", config.head_dim),
        ("rms_norm_eps", config.norm_eps),
        ("rope_theta", config.rope_theta),
    )


def start(config: TransformerConfig, key: Array) -> Params:
    """New parameters. Both residual branches end in zeros: the layer begins as its norm alone."""
    return without_branches(MODULE.new(config, key))


def without_branches(params: Params) -> Params:
    """The parameters of a layer, which are changed: both residual branches end in zeros."""
    for module, name in (("attention", "o"), ("mlp", "down")):
        params[module][name] = jax.tree.map(jnp.zeros_like, params[module][name])
    return params


def build(config: TransformerConfig, dtype: Any = jnp.float32) -> Prefix:
    """The layer as a map of features; ``dtype`` is that of its cache."""
    return Prefix(Bound(init_cache, config, dtype, 1), Bound(_apply, config))


def init_cache(
    config: TransformerConfig,
    dtype: Any,
    layers: int,
    batch: int,
    slots: int,
    windows: tuple[int | None, ...] = (),
) -> KVCache:
    """An empty cache of so many layers of this shape."""
    return kv.zeros(layers, batch, config.num_kv_heads, slots, config.head_dim, dtype, windows)


def _apply(
    config: TransformerConfig,
    params: ModelParams,
    features: Array,
    cache: KVCache,
    layout: Layout | None = None,
) -> tuple[Array, KVBlock]:
    layer = MODULE.merge(config, params.draft["prefix"])
    view = past(cache, features.shape[1], layout)
    x = features.astype(layer.norm.scale.dtype)
    x, k, v = layer(x, rope_angle(config, view.positions), view, stored_at(cache, None, 0))
    x = layer.norm(x)
    block = KVBlock((k,), (v,), x[..., 0].astype(jnp.float32))
    return x.astype(features.dtype), block


def feed(
    apply: Callable[..., Any], commit: Callable[..., Any], inputs: Any, count: Array, cache: Any
) -> tuple[Any, Any]:
    """Feeds the first count[b] entries of arrays [B,T,...] to an empty cache, ``CHUNK`` at a time.

    ``apply(inputs, cache) -> (outputs, block)``; ``commit`` as ``cache.commit``. Returns the
    outputs, arrays [B,T,...], and the cache.
    """
    batch, size = jax.tree.leaves(inputs)[0].shape[:2]

    def block(cache, piece, start):
        out, own = apply(piece, cache)
        width = jax.tree.leaves(piece)[0].shape[1]
        return commit(cache, own, jnp.clip(count - start, 0, width)), out

    def stack(x: Array) -> Array:
        return x[:, :whole].reshape(batch, -1, CHUNK, *x.shape[2:]).swapaxes(0, 1)

    def unstack(x: Array) -> Array:
        return x.swapaxes(0, 1).reshape(batch, whole, *x.shape[3:])

    whole, pieces = size // CHUNK * CHUNK, []
    if whole:
        xs = jax.tree.map(stack, inputs), jnp.arange(0, whole, CHUNK)
        cache, out = jax.lax.scan(lambda cache, xs: block(cache, *xs), cache, xs)
        pieces.append(jax.tree.map(unstack, out))
    if size > whole:
        cache, out = block(cache, jax.tree.map(lambda x: x[:, whole:], inputs), whole)
        pieces.append(out)
    return jax.tree.map(lambda *each: jnp.concatenate(each, 1), *pieces), cache


def layer(width: int, head_dim: int, heads: int, kv_heads: int, inner: int) -> TransformerConfig:
    """The shape of a Llama layer over features. Raises UserError for an odd ``head_dim``."""
    if head_dim % 2:
        raise UserError(f"head_dim is {head_dim}; rotary positions need an even number")
    # Vocabulary and largest position are 0: the layer has no embeddings and no table of positions.
    return TransformerConfig(
        *("llama", 0, width, inner, 1, heads, kv_heads, head_dim, 0), norm_eps=EPS, rope_theta=THETA
    )
