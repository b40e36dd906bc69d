"""One depth of a draft compared with the text and with the target: what losses of heads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.checks import number, one_of
from specjax.divergences import DIVERGENCES
from specjax.drafters.heads._vocabulary import gather
from specjax.errors import UserError


class Terms(NamedTuple):
    """How every depth is compared."""

    first: jax.Array  # the number of labels that each depth is divided by, at least 1
    ce: float  # weight of the cross-entropy
    teacher: float  # weight of the divergence
    divergence: Callable[..., jax.Array]  # (target's logits, head's logits) -> f[...]
    pace: float | None = None  # see ``Pace``; None: the same weight at all places of a depth


class Pace(NamedTuple):
    """The depths before, for the weights of D-PACE.

    With q_i the probability that the draft gives the text's token at depth i, depth k has the
    weight w_k = sum over j >= k of c_j, c_j = product over i <= j of (1 - a) q_i + a, a constant
    for the gradient: how many tokens are accepted at this depth and behind it, with probabilities
    moved towards 1 by a. sum_k w_k l_k = sum_j c_j (l_0 + ... + l_j), so one pass from the first
    depth to the last is enough. Depths without a label, and those that are dropped after an entry
    (conditional drop), are left out: they add nothing to the weights of the depths before them.
    """

    reached: jax.Array  # f[B,P] c of the newest depth
    sums: jax.Array  # f[B,P,3] of all depths so far: loss, scale, loss of a uniform guess


def begin(terms: Terms, shape: tuple[int, ...], dtype: jnp.dtype) -> Pace | None:
    """Before the first depth of drafts at places [B,P]; None without ``Terms.pace``."""
    if terms.pace is None:
        return None
    return Pace(jnp.ones(shape, dtype), jnp.zeros((*shape, 3), dtype))


def check(
    ce: float, teacher: float, decay: float, divergence: str, pace: float | None = None
) -> None:
    """Raises UserError for weights out of range or without effect."""
    for name, value in (("ce", ce), ("teacher", teacher), ("decay", decay)):
        number(f"loss.{name}", value, ">= 0", lambda x: x >= 0)
    one_of("loss.divergence", divergence, tuple(DIVERGENCES))
    if divergence != "forward_kl" and not teacher:
        raise UserError(
            f"loss.divergence is {divergence!r} and loss.teacher, its weight, is 0; give "
            "loss.teacher, or leave loss.divergence out"
        )
    if not ce and not teacher:
        raise UserError("loss.ce and loss.teacher are both 0; make one of them positive")
    if pace is None:
        return
    number("loss.pace", pace, "in [0, 1]", lambda x: 0 <= x <= 1)
    if decay != 1:
        raise UserError(
            f"loss.pace is {pace} and loss.decay {decay}, and both are weights of depths; leave "
            "loss.decay 1, or leave loss.pace out"
        )


def compare(
    terms: Terms,
    logits: jax.Array,
    target_logits: jax.Array,
    labels: jax.Array,
    counted: jax.Array,
    pace: Pace | None = None,
) -> tuple[jax.Array, dict[str, jax.Array], Pace | None]:
    """(loss f[], metrics, pace of this depth) of one depth.

    ``logits`` and ``target_logits`` f[B,T,V], ``labels`` i32[B,T], ``counted`` bool[B,T]. The
    metrics: ``agreement``, how often both prefer the same token; ``labels``, how many count;
    ``scale``, the sum of the weights per label of the first depth; ``uniform``, the loss of a guess
    that gives all tokens the same probability. ``pace`` is that of the depth before (``begin``);
    with it the sum of the losses of all depths is the weighted one, not each of them.
    """
    ce, teacher = terms.ce, terms.teacher
    value = jnp.zeros(labels.shape, logits.dtype)
    uniform = jnp.full(labels.shape, ce * jnp.log(logits.shape[-1]), logits.dtype)
    right = None
    if ce or pace is not None:
        log_probs = jax.nn.log_softmax(logits)
        right = jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    if ce and right is not None:
        value -= ce * right
    if teacher:
        value += teacher * terms.divergence(target_logits, logits)
        # [V] only: XLA would fold a constant of the whole shape, slowly.
        uniform += teacher * terms.divergence(target_logits, jnp.zeros(logits.shape[-1]))
    scale = jnp.full_like(uniform, ce + teacher)
    parts = jnp.where(counted[..., None], jnp.stack([value, scale, uniform], -1), 0)
    if pace is not None:
        assert right is not None and terms.pace is not None
        smooth = (1 - terms.pace) * jnp.exp(jax.lax.stop_gradient(right)) + terms.pace
        pace = Pace(jnp.where(counted, pace.reached * smooth, pace.reached), pace.sums + parts)
        parts = jnp.where(counted, pace.reached, 0)[..., None] * pace.sums
    total, scale, uniform = parts.sum((0, 1)) / terms.first
    same = counted & (sampling.argmax(logits) == sampling.argmax(target_logits))
    sizes = {
        "agreement": same.sum() / jnp.maximum(counted.sum(), 1),
        "labels": counted.sum(),
        "scale": scale,
        "uniform": uniform,
    }
    return total, sizes, pace


def compare_in(
    ids: np.ndarray | None,
    terms: Terms,
    logits: jax.Array,
    target_logits: jax.Array,
    labels: jax.Array,
    counted: jax.Array,
    pace: Pace | None = None,
) -> tuple[jax.Array, dict[str, jax.Array], Pace | None]:
    """``compare`` of logits f[B,T,V_d] of a draft vocabulary with the target's f[B,T,V].

    Distributions are those over the draft vocabulary, ``ids`` i32[V_d]; None: all tokens. Places at
    which the text (where its probability is needed) or the target's preferred token (with
    ``teacher``) is outside of it are left out. The metrics count all places.
    """
    if ids is None:
        return compare(terms, logits, target_logits, labels, counted, pace)
    table = np.full(target_logits.shape[-1], -1, np.int32)
    table[ids] = np.arange(len(ids))
    best = sampling.argmax(target_logits)
    place, best = (jnp.asarray(table)[each] for each in (labels, best))
    kept = counted
    if terms.ce or pace is not None:
        kept &= place >= 0
    if terms.teacher:
        kept &= best >= 0
    own, place = gather(ids, target_logits), jnp.maximum(place, 0)
    value, sizes, pace = compare(terms, logits, own, place, kept, pace)
    same = counted & (best == sampling.argmax(logits))
    sizes["labels"] = counted.sum()
    sizes["agreement"] = same.sum() / jnp.maximum(sizes["labels"], 1)
    return value, sizes, pace
