"""What is between an early exit and its head: nothing, a norm, a linear map, or an attention layer.

With x the output of the last layer that is computed, the head reads

    "none"    norm(x), the target's last norm
    "norm"    norm(x), with a scale of its own
    "linear"  norm(x + x W)
    "layer"   norm(x + attention(norm'(x))): one attention over all x of the text, with a cache of
              its own (Kangaroo, Liu et al. 2024, 2404.18911, section 3.2)

Norms are RMSNorms. The head is the target's, or a copy of it that is trained too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache
from specjax.drafters.heads import _prefix
from specjax.drafters.heads._family import Ends, output_kernel
from specjax.models.attention import Attention, past, rope_angle, stored
from specjax.models.linear import Linear, linear_options
from specjax.models.logits import in_float32
from specjax.models.norm import Norm
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Layout
from specjax.types import LM, ModelParams, Output, Params

NONE, NORM, LINEAR, LAYER = KINDS = ("none", "norm", "linear", "layer")
HEADS = ("shared", "own")
# Random vectors by which the scale of the target's last norm is read.
FITTED = 64


class Shape(NamedTuple):
    """The static facts of an adapter."""

    kind: str  # one of KINDS
    config: TransformerConfig  # of its norms and its attention
    # V, the width of a head of its own; None: the target's head
    vocab: int | None = None

    @property
    def trained(self) -> bool:
        """Whether it has parameters."""
        return self.kind != NONE or self.vocab is not None


class Adapter(NamedTuple):
    """An exit of a target, with its adapter."""

    shape: Shape
    layer: int  # how many layers are computed
    # The model of these layers. With an adapter, the last of them is its only tap.
    part: LM
    # What it uses of the target; None: an exit without parameters uses the part's own logits.
    ends: Ends | None

    @property
    def taps(self) -> tuple[int, ...]:
        """The layer of the target whose output an adapter reads."""
        return (self.layer - 1,)

    @property
    def facts(self) -> tuple[tuple[str, Any], ...]:
        """What config.json must hold in addition to the tensors."""
        config, facts = self.shape.config, (("exit_layer", self.layer),)
        if self.shape.kind == LAYER:
            return (*facts, *_prefix.facts(config))
        return facts if self.shape.kind == NONE else (*facts, ("rms_norm_eps", config.norm_eps))


class _Module(nnx.Module):
    def __init__(self, shape: Shape, dtype, rngs: nnx.Rngs):
        config, kw = shape.config, linear_options(False, dtype, rngs)
        if shape.kind == LAYER:
            self.attention_norm = Norm(config, dtype)
            self.attention = Attention(config, dtype, rngs)
        if shape.kind == LINEAR:
            self.linear = Linear(config.hidden_size, config.hidden_size, **kw)
        if shape.kind != NONE:
            self.norm = Norm(config, dtype)
        if shape.vocab is not None:
            self.head = Linear(config.hidden_size, shape.vocab, **kw)


@functools.cache
def _abstract(shape: Shape, dtype: Any) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: _Module(shape, dtype, nnx.Rngs(0))))


def _merge(shape: Shape, params: Params) -> Any:
    """The module with these parameters (inside a traced function, free at run time)."""
    graph, state = _abstract(shape, jnp.dtype(jax.tree.leaves(params)[0].dtype))
    # A copy: tracers must not be written into the cached state.
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def leaves(shape: Shape) -> Params:
    """The shapes of the parameters, a plain dict of ``jax.ShapeDtypeStruct``."""
    return nnx.to_pure_dict(_abstract(shape, jnp.dtype(jnp.float32))[1])


def init_cache(adapter: Adapter, batch: int, slots: int, dtype: Any) -> KVCache:
    """The cache of the layer."""
    config = adapter.shape.config
    return kv.zeros(1, batch, config.num_kv_heads, slots, config.head_dim, dtype)


def logits(
    adapter: Adapter,
    params: ModelParams,
    out: Output,
    cache: KVCache | None = None,
    layout: Layout | None = None,
    block: KVBlock | None = None,
) -> tuple[jax.Array, Any]:
    """(f[B,T,V] in float32 at least, the layer's keys and values of these tokens or ()).

    ``out`` is that of the part for the T tokens: ``hidden`` without an adapter, else ``taps``.
    ``cache``, ``layout`` and ``block`` are the layer's own, as in ``LM.apply``.
    """
    shape, own = adapter.shape, ()
    if not shape.trained:
        return out.logits, own
    module, x = _merge(shape, params.draft), out.hidden
    if shape.kind != NONE:
        x = out.taps[0].astype(module.norm.scale.dtype)
    if shape.kind == LINEAR:
        x = x + module.linear(x)
    if shape.kind == LAYER:
        assert cache is not None
        x, own = _attended(adapter, module, x, cache, layout, block)
    if shape.kind != NONE:
        x = module.norm(x).astype(out.taps[0].dtype)
    if shape.vocab is not None:
        x = x.astype(module.head.kernel.dtype)
        return in_float32(module.head(x)), own
    assert adapter.ends is not None
    return in_float32(adapter.ends.unembed(params.target, x)), own


def _attended(
    adapter: Adapter,
    module: Any,
    x: jax.Array,
    cache: KVCache,
    layout: Layout | None,
    block: KVBlock | None,
) -> tuple[jax.Array, KVBlock]:
    """x [B,T,E] with the result of the attention, and the keys and values."""
    fed = 0 if block is None else block.size
    view = past(cache, x.shape[1], layout, fed)
    angle = rope_angle(adapter.shape.config, view.positions)
    own = stored(cache, block, 0)
    attended, k, v = module.attention(module.attention_norm(x), angle, view, own)
    x = x + attended
    return x, KVBlock((k,), (v,), x[..., 0].astype(jnp.float32))


def remember(adapter: Adapter, params: ModelParams, features: jax.Array, cache: KVCache) -> KVBlock:
    """The layer's keys and values of T more tokens of the text, whose x is ``features`` [B,T,E].

    The compiler removes the attention, which is not used.
    """
    module = _merge(adapter.shape, params.draft)
    x = features.astype(module.norm.scale.dtype)
    block = _attended(adapter, module, x, cache, None, None)[1]
    # Not the result of the attention: the block then depends on the features alone.
    return block.replace(output=block.k[0][..., 0, 0].astype(jnp.float32))


def start(adapter: Adapter, target: LM, target_params: Params, key: jax.Array) -> Params:
    """New parameters: with them the exit is nearly that without an adapter.

    The scale of the norm is that of the target's last norm (of a LayerNorm without its bias), W is
    0, and the layer is random (standard deviation 0.02), so its attention adds little. A head of
    its own is a copy of the target's.
    """
    shape, (key, norm_key) = adapter.shape, jax.random.split(key)
    module = _Module(shape, jnp.float32, nnx.Rngs(key))
    params = nnx.to_pure_dict(nnx.state(module))
    if shape.kind == LINEAR:
        params["linear"]["kernel"] = jnp.zeros_like(params["linear"]["kernel"])
    if shape.kind != NONE and target.last_norm is not None:
        norm = Bound(target.last_norm, target_params)
        params["norm"]["scale"] = _scale_of(norm, shape.config, norm_key)
    if shape.vocab is not None:
        kernel = output_kernel(target, target_params)
        params["head"]["kernel"] = kernel.astype(params["head"]["kernel"].dtype)
    return params


def _scale_of(
    norm: Callable[[jax.Array], jax.Array], config: TransformerConfig, key: jax.Array
) -> jax.Array:
    """f32[E]: the scale of a norm, by least squares over random vectors."""
    x = jax.random.normal(key, (FITTED, config.hidden_size))
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_eps)
    return (norm(x).astype(jnp.float32) * normed).sum(0) / (normed * normed).sum(0)
