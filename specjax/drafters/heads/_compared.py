"""One depth of a draft compared with the text and with the target: what losses of heads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.checks import number, one_of
from specjax.divergences import DIVERGENCES
from specjax.errors import UserError


class Terms(NamedTuple):
    """How every depth is compared."""

    first: jax.Array  # the number of labels that each depth is divided by, at least 1
    ce: float  # weight of the cross-entropy
    teacher: float  # weight of the divergence
    divergence: Callable[..., jax.Array]  # (target's logits, head's logits) -> f[...]


def check(ce: float, teacher: float, decay: float, divergence: str) -> None:
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


def compare(
    terms: Terms,
    logits: jax.Array,
    target_logits: jax.Array,
    labels: jax.Array,
    counted: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss f[], metrics) of one depth.

    ``logits`` and ``target_logits`` f[B,T,V], ``labels`` i32[B,T], ``counted`` bool[B,T]. The
    metrics: ``agreement``, how often both prefer the same token; ``labels``, how many count;
    ``scale``, the sum of the weights per label of the first depth; ``uniform``, the loss of a guess
    that gives all tokens the same probability.
    """
    first, ce, teacher, divergence = terms
    value = jnp.zeros(labels.shape, logits.dtype)
    uniform = jnp.full(labels.shape, ce * jnp.log(logits.shape[-1]), logits.dtype)
    if ce:
        log_probs = jax.nn.log_softmax(logits)
        value -= ce * jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    if teacher:
        value += teacher * divergence(target_logits, logits)
        # [V] only: XLA would fold a constant of the whole shape, slowly.
        uniform += teacher * divergence(target_logits, jnp.zeros(logits.shape[-1]))
    same = counted & (sampling.argmax(logits) == sampling.argmax(target_logits))
    sizes = {
        "agreement": same.sum() / jnp.maximum(counted.sum(), 1),
        "labels": counted.sum(),
        "scale": (ce + teacher) * counted.sum() / first,
        "uniform": jnp.where(counted, uniform, 0).sum() / first,
    }
    return jnp.where(counted, value, 0).sum() / first, sizes
