"""An early exit in the rounds of decoding: the model that drafts, and what it keeps.

The first layers read the target's cache. An adapter's layer has a cache of its own: the target's
hidden states of the pending token and the accepted nodes are kept after a verdict, and the next
round begins by adding their keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as kv
from specjax import tree
from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache
from specjax.drafters.heads import _prefix
from specjax.drafters.self_speculation import _exit_adapter
from specjax.drafters.self_speculation._exit_adapter import LAYER, Adapter
from specjax.drafters.self_speculation._own_cache import Inner
from specjax.types import Context, LowerLayers, ModelParams, Output, Verdict


class Kept(struct.PyTreeNode):
    """What an adapter's layer keeps from round to round."""

    cache: KVCache  # of the committed text without the slots of ``features``
    # [B,M+1,E] the target's hidden states of the tokens that follow those of the cache
    features: jax.Array


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
    return Inner(
        model,
        _pair,
        Bound(_view_of_layer, adapter),
        Bound(_init, adapter, depth),
        _commit,
        features=True,
        lower=lower,
    )


def _lower(adapter: Adapter, block: _Both) -> LowerLayers:
    """``Inner.lower``."""
    return LowerLayers(block.hidden, block.part, adapter.layer)


def _pair(params: ModelParams) -> ModelParams:
    """``Inner.params``."""
    return params


def _apply(
    adapter: Adapter,
    reuse: bool,
    params: ModelParams,
    tokens: jax.Array,
    cache: _Both,
    layout: tree.Layout | None = None,
    block: _Both | None = None,
) -> tuple[Output, _Both]:
    """``LM.apply`` of the exit; the cache and the block are those of both."""
    first = None if block is None else block.part
    out, part = adapter.part.apply(params.target, tokens, cache.part, layout, first)
    hidden = out.taps[0] if reuse else ()
    if adapter.shape.kind != LAYER:
        logits, _ = _exit_adapter.logits(adapter, params, out)
        return out._replace(logits=logits), _Both(part, hidden=hidden)
    more = None if block is None else block.own
    logits, own = _exit_adapter.logits(adapter, params, out, cache.own, layout, more)
    return out._replace(logits=logits), _Both(part, own, hidden)


def _view(params: ModelParams, context: Context, kept: Any) -> tuple[_Both, Any]:
    """``Inner.view`` of an exit without a layer of its own."""
    return _Both(context.cache), kept


def _view_of_layer(
    adapter: Adapter, params: ModelParams, context: Context, kept: Kept
) -> tuple[_Both, Kept]:
    """``Inner.view``: adds what the layer's cache lacks. A row that is finished may lack none."""
    missing = jnp.clip(context.length - 1 - kept.cache.length, 0, kept.features.shape[1])
    block = _exit_adapter.remember(adapter, params, kept.features, kept.cache)
    cache = kv.commit(kept.cache, block, missing)
    return _Both(context.cache, cache), kept.replace(cache=cache)


def _init(
    adapter: Adapter,
    depth: int,
    params: ModelParams,
    context: Context,
    target_out: Output,
    slots: int,
) -> Kept:
    """The layer's cache of the prompt without its pending token."""
    [features] = target_out.taps
    batch, size, width = features.shape
    dtype = jax.tree.leaves(params.draft)[0].dtype
    cache = _exit_adapter.init_cache(adapter, batch, slots, dtype)
    if size:
        apply = Bound(_remembered, adapter, params)
        cache = _prefix.feed(apply, kv.commit, features, context.length - 1, cache)[1]
    return Kept(cache, jnp.zeros((batch, depth + 1, width), features.dtype))


def _remembered(
    adapter: Adapter, params: ModelParams, features: jax.Array, cache: KVCache
) -> tuple[None, KVBlock]:
    return None, _exit_adapter.remember(adapter, params, features, cache)


def _commit(
    params: ModelParams, kept: Kept, drafted: None, verdict: Verdict, target_out: Output
) -> Kept:
    """``Inner.commit``: keeps the target's hidden states of the pending token and the path."""
    fed = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    inside = jnp.arange(fed.shape[1]) < verdict.count[:, None]
    [features] = tree.take(target_out.taps, fed, inside)
    alive = (verdict.count > 0)[:, None, None]
    return kept.replace(features=jnp.where(alive, features, kept.features))
