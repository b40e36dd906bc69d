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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct

from specjax import cache as kv
from specjax import tree
from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache
from specjax.drafters import growth
from specjax.drafters.files import Ends
from specjax.drafters.heads import _prefix
from specjax.drafters.self_speculation._own_cache import Inner
from specjax.models.attention import Attention, past, rope_angle, stored
from specjax.models.layers import Linear, Module, Norm, dtype_of, in_float32, linear_options
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Layout
from specjax.types import LM, Array, Context, LowerLayers, ModelParams, Output, Params, Verdict

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
    # What it uses of the target. An exit without parameters uses the part's own logits.
    ends: Ends

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


MODULE = Module(_Module)


def init_cache(adapter: Adapter, params: ModelParams, batch: int, slots: int) -> KVCache:
    """The cache of the layer, in the dtype of its parameters."""
    return _prefix.init_cache(adapter.shape.config, dtype_of(params.draft), 1, batch, slots)


def logits(
    adapter: Adapter,
    params: ModelParams,
    out: Output,
    cache: Any = None,
    layout: Layout | None = None,
    block: KVBlock | None = None,
) -> tuple[Array, Any]:
    """(f[B,T,V] in float32 at least, the layer's keys and values of these tokens or ()).

    ``out`` is that of the part for the T tokens: ``hidden`` without an adapter, else ``taps``.
    ``cache``, ``layout`` and ``block`` are the layer's own, as in ``LM.apply``.
    """
    shape, own = adapter.shape, ()
    if not shape.trained:
        return out.logits, own
    module, x = MODULE.merge(shape, params.draft), out.hidden
    if shape.kind != NONE:
        x = out.taps[0].astype(module.norm.scale.dtype)
    if shape.kind == LINEAR:
        x = x + module.linear(x)
    if shape.kind == LAYER:
        x, own = _attended(shape, module, x, cache, layout, block)
    if shape.kind != NONE:
        x = module.norm(x).astype(out.taps[0].dtype)
    if shape.vocab is not None:
        x = x.astype(module.head.kernel.dtype)
        return in_float32(module.head(x)), own
    return in_float32(adapter.ends.unembed(params.target, x)), own


def _attended(
    shape: Shape, module: Any, x: Array, cache: Any, layout: Layout | None, block: KVBlock | None
) -> tuple[Array, KVBlock]:
    """x [B,T,E] with the result of the attention, and the keys and values."""
    fed = 0 if block is None else block.size
    view = past(cache, x.shape[1], layout, fed)
    angle, own = rope_angle(shape.config, view.positions), stored(cache, block, 0)
    attended, k, v = module.attention(module.attention_norm(x), angle, view, own)
    x = x + attended
    return x, KVBlock((k,), (v,), x[..., 0].astype(jnp.float32))


def remember(adapter: Adapter, params: ModelParams, features: Array, cache: KVCache) -> KVBlock:
    """The layer's keys and values of T more tokens of the text, whose x is ``features`` [B,T,E].

    The compiler removes the attention, which is not used.
    """
    module = MODULE.merge(adapter.shape, params.draft)
    x = features.astype(module.norm.scale.dtype)
    block = _attended(adapter.shape, module, x, cache, None, None)[1]
    # Not the result of the attention: the block then depends on the features alone.
    return block.replace(output=block.k[0][..., 0, 0].astype(jnp.float32))


def start(adapter: Adapter, target: LM, target_params: Params, key: Array) -> Params:
    """New parameters: with them the exit is nearly that without an adapter.

    The scale of the norm is that of the target's last norm (of a LayerNorm without its bias), W is
    0, and the layer is random (standard deviation 0.02), so its attention adds little. A head of
    its own is a copy of the target's.
    """
    shape, (key, norm_key) = adapter.shape, jax.random.split(key)
    params = MODULE.new(shape, key)
    if shape.kind == LINEAR:
        params["linear"]["kernel"] = jnp.zeros_like(params["linear"]["kernel"])
    if shape.kind != NONE and target.inside.last_norm is not None:
        norm = Bound(target.inside.last_norm, target_params)
        params["norm"]["scale"] = _scale_of(norm, shape.config, norm_key)
    if shape.vocab is not None:
        kernel = adapter.ends.output_kernel(target_params)
        params["head"]["kernel"] = kernel.astype(params["head"]["kernel"].dtype)
    return params


def _scale_of(norm: Callable[[Array], Array], config: TransformerConfig, key: Array) -> Array:
    """f32[E]: the scale of a norm, by least squares over random vectors."""
    x = jax.random.normal(key, (FITTED, config.hidden_size))
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_eps)
    return (norm(x).astype(jnp.float32) * normed).sum(0) / (normed * normed).sum(0)


# An early exit in the rounds of decoding: the model that drafts, and what it keeps.
#
# The first layers read the target's cache. An adapter's layer has a cache of its own: the target's
# hidden states of the pending token and the accepted nodes are kept after a verdict, and the next
# round begins by adding their keys and values.


class Kept(struct.PyTreeNode):
    """What an adapter's layer keeps from round to round."""

    cache: KVCache  # of the committed text without the slots of ``features``
    # [B,M+1,E] the target's hidden states of the tokens that follow those of the cache
    features: Array


class _Both(NamedTuple):
    """What is read, or what was computed for a block: of the first layers, and of the adapter."""

    part: Any
    own: Any = ()  # (): the adapter has no layer
    hidden: Any = ()  # of a block: [B,P,E] the output of the last layer; (): it is not needed


def inner(adapter: Adapter, depth: int, reuse: bool) -> Inner:
    """The model that drafts; ``depth`` is M. Its parameters are the pair ``ModelParams``.

    ``reuse``: the target's pass goes on from the layers that were computed for a draft.
    """
    if reuse:
        adapter = adapter._replace(part=adapter.part.with_taps(adapter.taps))
    model = adapter.part._replace(apply=Bound(_apply, adapter, reuse))
    lower = Bound(_lower, adapter) if reuse else None
    if adapter.shape.kind != LAYER:
        return Inner(model, _pair, _view, lower=lower)
    view, init = Bound(_view_of_layer, adapter), Bound(_init, adapter, depth)
    return Inner(model, _pair, view, init, _commit, features=True, lower=lower)


def _lower(adapter: Adapter, state: growth.State) -> LowerLayers:
    """``Inner.lower``."""
    return LowerLayers(state.block.hidden, state.block.part, adapter.layer)


def _pair(params: ModelParams) -> ModelParams:
    """``Inner.params``."""
    return params


def _apply(
    adapter: Adapter,
    reuse: bool,
    params: ModelParams,
    tokens: Array,
    cache: _Both,
    layout: tree.Layout | None = None,
    block: _Both | None = None,
) -> tuple[Output, _Both]:
    """``LM.apply`` of the exit; the cache and the block are those of both."""
    first = None if block is None else block.part
    out, part = adapter.part.apply(params.target, tokens, cache.part, layout, first)
    hidden = out.taps[0] if reuse else ()
    more = None if block is None else block.own
    read, own = logits(adapter, params, out, cache.own, layout, more)
    return out._replace(logits=read), _Both(part, own, hidden)


def _view(params: ModelParams, context: Context, kept: Any) -> tuple[_Both, Any]:
    """``Inner.view`` of an exit without a layer of its own."""
    return _Both(context.cache), kept


def _view_of_layer(
    adapter: Adapter, params: ModelParams, context: Context, kept: Kept
) -> tuple[_Both, Kept]:
    """``Inner.view``: adds what the layer's cache lacks. A row that is finished may lack none."""
    missing = jnp.clip(context.length - 1 - kept.cache.length, 0, kept.features.shape[1])
    block = remember(adapter, params, kept.features, kept.cache)
    cache = kv.commit(kept.cache, block, missing)
    return _Both(context.cache, cache), kept.replace(cache=cache)


def _init(
    adapter: Adapter, depth: int, params: ModelParams, context: Context, out: Output, slots: int
) -> Kept:
    """The layer's cache of the prompt without its pending token."""
    [features] = out.taps
    batch, size, width = features.shape
    cache = init_cache(adapter, params, batch, slots)
    if size:

        def apply(features: Array, cache: KVCache) -> tuple[None, KVBlock]:
            return None, remember(adapter, params, features, cache)

        cache = _prefix.feed(apply, kv.commit, features, context.length - 1, cache)[1]
    return Kept(cache, jnp.zeros((batch, depth + 1, width), features.dtype))


def _commit(params: ModelParams, kept: Kept, drafted: None, verdict: Verdict, out: Output) -> Kept:
    """``Inner.commit``: keeps the target's hidden states of the pending token and the path."""
    [features] = growth.fed_to_target(out.taps, verdict)
    alive = (verdict.count > 0)[:, None, None]
    return kept.replace(features=jnp.where(alive, features, kept.features))
