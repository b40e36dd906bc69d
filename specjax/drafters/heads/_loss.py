"""The loss that heads are trained with."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import one_of
from specjax.divergences import DIVERGENCES
from specjax.drafters.heads import _compared, _text
from specjax.drafters.heads._family import Heads
from specjax.errors import UserError
from specjax.types import LM, Batch, ModelParams

SLOTS = ("all", "one")


class _Labels(NamedTuple):
    """What the logits of every depth are compared with."""

    batch: Batch
    teachers: jax.Array  # f[B,T,V] the target's logits, constants
    terms: _compared.Terms


def loss(
    heads: Heads,
    target: LM,
    params: Any,
    target_params: Any,
    batch: Batch,
    key: jax.Array,
    *,
    ce: float = 1.0,
    teacher: float = 0.0,
    decay: float = 1.0,
    slots: str = "all",
    divergence: str = "forward_kl",
    pace: float | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss f32[] per labelled position, and metrics.

    The sum over depths d of decay^d (ce * cross-entropy with the text + teacher * divergence from
    the target to the head, one of ``divergences.DIVERGENCES``). Every depth is divided by the
    number of labels of the first (with ``Batch.depths``: of all), so that micro-batches add up.
    ``pace`` in [0, 1] gives the depths of every draft the weights of D-PACE instead of ``decay``
    (``_compared.Pace``).
    ``slots`` "one" draws one depth per batch, uniformly: in expectation the mean over depths, in
    the memory of one head (Stern et al. 2018, 1811.03115, section 6).

    The metrics ``agreement_<d>``, d from 1, are how often a head prefers the same token as the
    target. ``scale`` is the sum of the weights of all head tokens, per labelled position: the loss
    divided by it is a mean per head token. ``uniform`` is the loss of heads that give all tokens
    the same probability. The target's logits are constants; its features are not, for a caller
    that differentiates ``target_params``.

    Raises:
        UserError: weights out of range, a batch of fewer than 3 tokens.
    """
    _check(heads, batch, slots, pace)
    _compared.check(ce, teacher, decay, divergence, pace)
    pair, batch = ModelParams(target_params, params), _text.of_output(target, batch)
    out, state = _text.begin(heads, target, pair, batch)
    teachers = jax.lax.stop_gradient(out.logits)
    count = _text.number_of_labels(batch, heads.depth)
    terms = _compared.Terms(jnp.maximum(count, 1), ce, teacher, DIVERGENCES[divergence], pace)
    labels = _Labels(batch, teachers, terms)
    term = Bound(_term, heads, labels)
    if slots == "one":
        depth = jax.random.randint(key, (), 0, heads.depth)
        value, sizes, *_ = jax.checkpoint(term)(pair, state, depth, None)
        sizes = {name: decay**depth * sizes[name] for name in ("scale", "uniform")}
        return decay**depth * value, {**sizes, "weight": jnp.float32(count)}
    total, metrics = jnp.zeros(()), {"scale": jnp.zeros(()), "uniform": jnp.zeros(())}
    weights = dict.fromkeys(("loss", *metrics), count)
    before = _compared.begin(terms, teachers.shape[:2], teachers.dtype)
    for depth in range(heads.depth):
        # The logits of one depth at a time: the backward pass computes them again.
        one = jax.checkpoint(term, static_argnums=2)
        value, sizes, state, before = one(pair, state, depth, before)
        total += decay**depth * value
        metrics[f"agreement_{depth + 1}"] = sizes.pop("agreement")
        weights[f"agreement_{depth + 1}"] = sizes.pop("labels")
        metrics |= {name: metrics[name] + decay**depth * size for name, size in sizes.items()}
    return total, {**metrics, "weight": jax.tree.map(jnp.float32, weights)}


def _check(heads: Heads, batch: Batch, slots: str, pace: float | None) -> None:
    one_of("loss.slots", slots, SLOTS)
    if slots == "one" and not heads.independent:
        raise UserError(
            f"each head of {heads.name} continues from the head before it; loss.slots must be 'all'"
        )
    if slots == "one" and pace is not None:
        raise UserError(
            f"loss.pace is {pace}, and loss.slots 'one' trains one depth at a time; leave one out"
        )
    if batch.tokens.shape[1] < 3:
        raise UserError("heads predict at least two tokens ahead; raise train.length to 2 or more")


def _term(
    heads: Heads,
    labels: _Labels,
    pair: ModelParams,
    state: Any,
    depth: Any,
    before: _compared.Pace | None,
) -> tuple[jax.Array, dict[str, jax.Array], Any, _compared.Pace | None]:
    """(loss of one depth; its metrics, see ``_compared``; the next state; the next ``Pace``)."""
    batch, teachers, terms = labels
    size = teachers.shape[1]
    logits, state = heads.step(pair, state, depth, _text.ahead(batch.tokens, depth + 1, size))
    tokens, counted = _text.label(batch, depth + 2, depth)
    target_logits = _text.ahead(teachers, depth + 1, size)
    value, sizes, pace = _compared.compare(terms, logits, target_logits, tokens, counted, before)
    return value, sizes, state, pace
