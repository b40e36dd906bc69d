"""An early exit along a text: its probabilities, forecasts, and the loss of its adapter.

The exit reads the text itself: position t of T predicts tokens[t + 1], with the same logits in
every round.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import divergences, logit_maps, sampling, tree
from specjax.checks import number, one_of
from specjax.divergences import DIVERGENCES
from specjax.drafters import _foresee
from specjax.drafters.draft_models._small_model import by_depth
from specjax.drafters.heads import _text
from specjax.drafters.self_speculation import _exit_adapter
from specjax.drafters.self_speculation._exit_adapter import NONE, Adapter
from specjax.errors import UserError
from specjax.models import lm
from specjax.sampling import Sampling
from specjax.types import LM, Batch, Context, ModelParams, Output


def logits(
    adapter: Adapter, params: ModelParams, tokens: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """f[B,T,V]: what the exit predicts after each token of i32[B,T]."""
    out = lm.forward(adapter.part, params.target, tokens, segments)
    return _read(adapter, params, out, segments)


def _read(
    adapter: Adapter, params: ModelParams, out: Output, segments: jax.Array | None
) -> jax.Array:
    """The exit's logits, from the outputs along whole texts."""
    if adapter.shape.kind != _exit_adapter.LAYER:
        return _exit_adapter.logits(adapter, params, out)[0]
    x = out.taps[0]
    dtype = jax.tree.leaves(params.draft)[0].dtype
    cache = _exit_adapter.init_cache(adapter, x.shape[0], 0, dtype)
    layout = None if segments is None else tree.segments(segments)
    return _exit_adapter.logits(adapter, params, out, cache, layout)[0]


def both(
    adapter: Adapter, target: LM, params: ModelParams, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """f[B,T,V] each: the logits of the exit and of the target, for all tokens but the last.

    ``target`` has the adapter's tap if there is an adapter: then one pass gives both.
    """
    segments = None if batch.segments is None else batch.segments[:, :-1]
    out = _text.output(target, params.target, batch)
    if adapter.shape.kind == NONE:
        return logits(adapter, params, batch.tokens[:, :-1], segments), out.logits
    return _read(adapter, params, out, segments), out.logits


def probs(adapter: Adapter, params: ModelParams, context: Context) -> jax.Array:
    """f32[B,S,V]: ``Drafter.probs``."""
    own = logits(adapter, params, context.tokens)
    own = logit_maps.along_text(context.sampling.maps, own, context.tokens)
    return sampling.to_probs(own, context.sampling)


def foresee(
    adapter: Adapter,
    target: LM,
    depth: int,
    params: ModelParams,
    batch: Batch,
    sampling_: Sampling,
) -> jax.Array:
    """f32[B,T,depth]: ``Training.foresee`` of a chain drawn from the exit's probabilities."""
    own, target_logits = both(adapter, target, params, batch)
    accepted = _foresee.accept_probs(own, target_logits, batch.tokens[:, 1:], sampling_)
    return by_depth(accepted, depth, 0)


def ranks(adapter: Adapter, depth: int, params: ModelParams, batch: Batch) -> jax.Array:
    """i32[B,T,depth]: ``Training.ranks``; depths differ by a shift."""
    segments = None if batch.segments is None else batch.segments[:, :-1]
    own = logits(adapter, params, batch.tokens[:, :-1], segments)
    return by_depth(_foresee.rank(own, batch.tokens[:, 1:]), depth, -1)


def loss(
    adapter: Adapter,
    target: LM,
    params: Any,
    target_params: Any,
    batch: Batch,
    key: jax.Array,
    *,
    ce: float = 0.0,
    teacher: float = 1.0,
    divergence: str = "forward_kl",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss f32[] per labelled position, and metrics.

    ce * cross-entropy with the text + teacher * divergence from the target's distribution
    (``divergences.DIVERGENCES``; forward KL has the gradient of Kangaroo's cross-entropy with soft
    labels). The target's logits are constants; its hidden states are not, for a caller that
    differentiates ``target_params``.

    Metrics: ``agreement`` and ``alpha``, the acceptance rates at temperature 0 and 1; ``scale`` and
    ``uniform`` as in ``heads._loss``.

    Raises:
        UserError: weights out of range or without effect.
    """
    del key
    _check(ce, teacher, divergence)
    own, target_logits = both(adapter, target, ModelParams(target_params, params), batch)
    target_logits = jax.lax.stop_gradient(target_logits)
    labels, counted = _text.label(batch, 1)
    size = jnp.maximum(counted.sum(), 1)

    def mean(values: jax.Array) -> jax.Array:
        return jnp.where(counted, values, 0).sum() / size

    value = jnp.zeros(labels.shape, own.dtype)
    uniform = jnp.full(labels.shape, ce * jnp.log(own.shape[-1]), own.dtype)
    if ce:
        picked = jnp.take_along_axis(own, labels[..., None], -1)[..., 0]
        value += ce * (jax.nn.logsumexp(own, -1) - picked)
    if teacher:
        distance = DIVERGENCES[divergence]
        value += teacher * distance(target_logits, own)
        # [V] only: XLA would fold a constant of the whole shape, slowly.
        uniform += teacher * distance(target_logits, jnp.zeros(own.shape[-1]))
    metrics = {
        "agreement": mean(divergences.agreement(target_logits, own)),
        "alpha": mean(divergences.overlap(target_logits, own)),
        "scale": jnp.float32(ce + teacher),
        "uniform": mean(uniform),
        "weight": counted.sum().astype(jnp.float32),
    }
    return mean(value), metrics


def _check(ce: float, teacher: float, divergence: str) -> None:
    for name, value in (("ce", ce), ("teacher", teacher)):
        number(f"loss.{name}", value, ">= 0", lambda x: x >= 0)
    one_of("loss.divergence", divergence, tuple(DIVERGENCES))
    if not ce and not teacher:
        raise UserError("loss.ce and loss.teacher are both 0; make one of them positive")
    if divergence != "forward_kl" and not teacher:
        raise UserError(
            f"loss.divergence is {divergence!r} and loss.teacher, its weight, is 0; give "
            "loss.teacher, or leave loss.divergence out"
        )
