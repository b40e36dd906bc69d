"""The modules for multi-token prediction as a ``Network``.

Parameters: {modules: {"0", "1", ...: {token_norm, feature_norm, norm: {scale}, fc: {kernel},
layers: {"0": a decoder layer}}}}, and, where files have copies of the target's, {embed:
{embedding}, head: {kernel}}.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax.bound import Bound
from specjax.drafters.heads import _mtp_layers as layers
from specjax.drafters.heads._family import Ends
from specjax.drafters.heads._mtp_layers import RAW, MtpShape
from specjax.drafters.heads._network import Fed, Network, embed_by, embed_own, init_cache
from specjax.models.attention import past, rope_angle
from specjax.models.logits import in_float32
from specjax.tree import Columns, Layout
from specjax.types import ModelParams, Output


def build(
    name: str,
    shape: MtpShape,
    ends: Ends,
    layers_of_target: int,
    *,
    own: Collection[str] = (),
    dtype: Any = jnp.float32,
    facts: tuple[tuple[str, Any], ...] = (),
) -> Network:
    """The modules of this shape on a target.

    Args:
        name: of the method.
        shape: of the modules.
        ends: what they use of the target.
        layers_of_target: how many layers it has; read if the hidden state before its norm is.
        own: "embed", "head": which of the target's ends the parameters have themselves.
        dtype: of parameters, activations and caches.
        facts: see ``Network``.
    """
    dtype, config = jnp.dtype(dtype), shape.config
    embed = embed_own if "embed" in own else Bound(embed_by, ends)
    return Network(
        name=name,
        width=config.hidden_size,
        taps=(layers_of_target - 1,) if shape.hidden == RAW else (),
        init_cache=Bound(init_cache, 1, config, dtype),
        read=Bound(_read, shape, dtype),
        apply=Bound(_apply, shape, dtype, embed),
        commit=kv.commit,
        logits=Bound(_logits, ends, "head" in own),
        start=Bound(_start, shape),
        facts=facts,
        modules=shape.modules,
    )


def _start(shape: MtpShape, target_params: Any, key: jax.Array) -> Any:
    return layers.new(shape, key)


def _read(shape: MtpShape, dtype: Any, params: ModelParams, out: Output) -> jax.Array:
    hidden = out.taps[0] if shape.hidden == RAW else out.hidden
    return hidden.astype(_at_least(dtype, params))


def _apply(
    shape: MtpShape,
    dtype: Any,
    embed: Callable[[ModelParams, jax.Array], jax.Array],
    params: ModelParams,
    tokens: jax.Array,
    features: jax.Array,
    cache: kv.KVCache,
    layout: Layout | Columns | None = None,
    block: kv.KVBlock | None = None,
    *,
    module: int = 0,
) -> tuple[Fed, kv.KVBlock]:
    """tokens i32[B,T] and features [B,T,D] -> (``Fed``, keys and values of these slots)."""
    dtype, fed = _at_least(dtype, params), 0 if block is None else block.size
    view = past(cache, tokens.shape[1], layout, fed)
    angle, embedded = rope_angle(shape.config, view.positions), embed(params, tokens).astype(dtype)
    if shape.zero_first:
        embedded = jnp.where((view.positions == 0)[..., None], 0, embedded)
    own = layers.merge(shape, params.draft["modules"][str(module)], dtype)
    return own(embedded, features.astype(dtype), angle, view, cache, block)


def _logits(ends: Ends, own_head: bool, params: ModelParams, hidden: jax.Array) -> jax.Array:
    if own_head:
        return in_float32(hidden @ params.draft["head"]["kernel"].astype(hidden.dtype))
    return in_float32(ends.unembed(params.target, hidden))


def _at_least(dtype: Any, params: ModelParams) -> Any:
    """``dtype``, or float64 for parameters of float64 (exactness tests)."""
    own = params.draft["modules"]["0"]["fc"]["kernel"].dtype
    return own if own == jnp.float64 else dtype
