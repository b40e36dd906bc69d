"""The training part of a draft network: its loss, its forecasts along a text, its facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.drafters import _foresee
from specjax.drafters._growth import Plan
from specjax.drafters.heads import _columns, _rollout_loss, _text
from specjax.drafters.heads._network import Network
from specjax.drafters.heads._vocabulary import spread
from specjax.types import LM, Batch, ModelParams, Training


def training(
    network: Network, target: LM, plan: Plan, defaults: Mapping[str, Any] | None = None
) -> Training:
    """The training part of a drafter that grows this network in the way of ``plan``.

    ``defaults`` are the method's values for keys of ``_rollout_loss.loss``.
    """
    if network.taps:
        target = target.with_taps(network.taps)
    texts = Bound(along, network, target)
    foresee = _text.foresee(texts, plan)
    ranks = Bound(_text.ranks, texts, plan.growth.depth)
    if network.modules > 2:
        foresee = foresee and Bound(_where_drafted, network, foresee, 0)
        ranks = Bound(_where_drafted, network, ranks, -1)
    return Training(
        loss=Bound(_rollout_loss.loss, network, target, **(defaults or {})),
        start=network.start,
        foresee=foresee,
        ranks=ranks,
        facts=network.facts,
    )


def _where_drafted(
    network: Network,
    values: Callable[..., jax.Array],
    none: int,
    params: ModelParams,
    batch: Batch,
    *more: Any,
) -> jax.Array:
    """[B,T,M]: the values, and ``none`` where the text has fewer tokens than there are modules."""
    early = _columns.text(batch).layout.depth < network.modules - 2
    early = _foresee.of_pending(early[..., None])
    own = values(params, batch, *more)
    return jnp.where(early, jnp.asarray(none, own.dtype), own)


def along(
    network: Network, target: LM, params: ModelParams, batch: Batch, depth: int
) -> _text.Texts:
    """``_text.Along`` of a network, after its first two arguments."""
    out, text = _text.output(target, params.target, batch), _columns.text(batch)
    features, before, size = network.read(params, out), (), out.hidden.shape[1]
    for number in range(depth):
        fed, own = _columns.step(network, text, number, params, features, before)
        logits = spread(network.ids, network.logits(params, fed.hidden), target.vocab_size)
        labels = _text.label(batch, number + 2)[0]
        yield labels, logits, _text.ahead(out.logits, number + 1, size)
        features, before = fed.feature, (*before, own)
