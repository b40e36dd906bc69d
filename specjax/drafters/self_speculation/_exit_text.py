"""An early exit along a text: its probabilities, forecasts, and the loss of its adapter.

The exit reads the text itself: position t of T predicts tokens[t + 1], with the same logits in
every round.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import declare, divergences, tree
from specjax.drafters import _foresee
from specjax.drafters.heads import _along_text, _depth_loss
from specjax.drafters.heads._depth_loss import LossKeys
from specjax.drafters.self_speculation import _exit_adapter
from specjax.drafters.self_speculation._exit_adapter import NONE, Adapter
from specjax.models import lm
from specjax.types import LM, Array, Batch, Context, ModelParams, Output


def logits(
    adapter: Adapter, params: ModelParams, tokens: Array, segments: Array | None = None
) -> Array:
    """f[B,T,V]: what the exit predicts after each token of i32[B,T]."""
    out = lm.forward(adapter.part, params.target, tokens, segments)
    return _read(adapter, params, out, segments)


def _read(adapter: Adapter, params: ModelParams, out: Output, segments: Array | None) -> Array:
    """The exit's logits, from the outputs along whole texts."""
    if adapter.shape.kind != _exit_adapter.LAYER:
        return _exit_adapter.logits(adapter, params, out)[0]
    x = out.taps[0]
    dtype = jax.tree.leaves(params.draft)[0].dtype
    cache = _exit_adapter.init_cache(adapter, x.shape[0], 0, dtype)
    layout = None if segments is None else tree.segments(segments)
    return _exit_adapter.logits(adapter, params, out, cache, layout)[0]


def both(adapter: Adapter, target: LM, params: ModelParams, batch: Batch) -> tuple[Array, Array]:
    """f[B,T,V] each: the logits of the exit and of the target, for all tokens but the last.

    ``target`` has the adapter's tap if there is an adapter: then one pass gives both.
    """
    out = _along_text.output(target, params.target, batch)
    if adapter.shape.kind == NONE:
        return logits_of(adapter, params, batch), out.logits
    return _read(adapter, params, out, _along_text.segments_of(batch)), out.logits


def logits_of(adapter: Adapter, params: ModelParams, batch: Batch) -> Array:
    """The first of ``both``."""
    return logits(adapter, params, batch.tokens[:, :-1], _along_text.segments_of(batch))


def probs(adapter: Adapter, params: ModelParams, context: Context) -> Array:
    """f32[B,S,V]: ``Drafter.probs``."""
    return _foresee.probs_along(logits(adapter, params, context.tokens), context)


@declare.method(LossKeys)
def loss(
    adapter: Adapter,
    target: LM,
    params: Any,
    target_params: Any,
    batch: Batch,
    key: Array,
    keys: LossKeys,
) -> tuple[Array, dict[str, Array]]:
    """Loss f32[] per labelled position, and metrics.

    ce * cross-entropy with the text + teacher * divergence from the target's distribution
    (``divergences.DIVERGENCES``; forward KL has the gradient of Kangaroo's cross-entropy with soft
    labels). The target's logits are constants; its hidden states are not, for a caller that
    differentiates ``target_params``.

    Metrics: ``agreement`` and ``alpha``, the acceptance rates at temperature 0 and 1; ``scale`` and
    ``uniform`` as in ``heads._depth_loss``.

    Raises:
        UserError: weights out of range or without effect.
    """
    del key
    own, target_logits = both(adapter, target, ModelParams(target_params, params), batch)
    target_logits = jax.lax.stop_gradient(target_logits)
    labels, counted = _along_text.label(batch, 1)
    terms = _depth_loss.terms_of(keys, counted.sum())
    value, sizes, _ = _depth_loss.compare(terms, own, target_logits, labels, counted)
    alpha = _depth_loss.mean(divergences.overlap(target_logits, own), counted)
    weight = jnp.float32(sizes.pop("labels"))
    return value, {**sizes, "alpha": alpha, "weight": weight}
