"""The loss of drafts along a text: every depth is compared with the text and with the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import declare, sampling
from specjax.declare import key
from specjax.divergences import DIVERGENCES, NAMES
from specjax.drafters.heads._along_text import Drafts, at
from specjax.drafters.heads._vocabulary import gather, place_of
from specjax.errors import UserError
from specjax.types import Array, Batch

# Bytes of the logits of all depths, in float32, above which a backward pass computes each depth
# again even if that is not asked for.
MOST = 2**31

Metrics = dict[str, Any]  # f32[] each, and "weight": the number of labels of each
# (carry, depth) -> (f[], metrics of the depth, carry)
Term = Callable[[Any, Any], tuple[Array, Metrics, Any]]
# (the number of labels or 1, the state after a depth, its logits, the target's, which labels
# count) -> (f[], metrics)
More = Callable[..., tuple[Array, Metrics]]


def divergence_key(needs: str, help: str = f"one of {NAMES}") -> Any:
    """The key ``divergence`` of a loss; without the weight ``needs`` it has no effect."""
    return key("forward_kl", help, choices=tuple(DIVERGENCES), needs=needs)


class LossKeys(declare.Keys, owner="loss."):
    """The keys of a loss that compares draft tokens with the text and with the target."""

    ce: float = key(1.0, "weight of the cross-entropy with the text", least=0)
    teacher: float = key(0.0, "weight of the divergence from the target", least=0)
    divergence: str = divergence_key("teacher")

    def check(self) -> None:
        """Raises UserError for weights without effect."""
        if not self.ce and not self.teacher:
            raise UserError("loss.ce and loss.teacher are both 0; make one of them positive")


class DepthKeys(LossKeys):
    """The keys of a loss of several depths."""

    decay: float = key(1.0, "factor on the loss from each depth to the next", least=0)
    pace: float | None = key(
        None, "gives the depths of every draft the weights of D-PACE instead", least=0, most=1
    )

    remat: bool = key(False, "recompute each depth in the backward pass")

    def check(self) -> None:
        """Raises UserError for weights without effect, and for two weights of depths."""
        super().check()
        if self.pace is not None and self.decay != 1:
            raise UserError(
                f"loss.pace is {self.pace} and loss.decay {self.decay}, and both are weights of "
                "depths; leave loss.decay 1, or leave loss.pace out"
            )


def mean(values: Array, counted: Array) -> Array:
    """The mean of the values that are ``counted``; 0 if none is."""
    return jnp.where(counted, values, 0).sum() / jnp.maximum(counted.sum(), 1)


class Pace(NamedTuple):
    """The depths before, for the weights of D-PACE.

    With q_i the probability that the draft gives the text's token at depth i, depth k has the
    weight w_k = sum over j >= k of c_j, c_j = product over i <= j of (1 - a) q_i + a, a constant
    for the gradient: how many tokens are accepted at this depth and behind it, with probabilities
    moved towards 1 by a. sum_k w_k l_k = sum_j c_j (l_0 + ... + l_j), so one pass from the first
    depth to the last is enough. Depths without a label, and those that are dropped after an entry
    (conditional drop), are left out: they add nothing to the weights of the depths before them.
    """

    reached: Array  # f[B,P] c of the newest depth
    sums: Array  # f[B,P,3] of all depths so far: loss, scale, loss of a uniform guess


def loss(
    drafts: Drafts, keys: DepthKeys, depths: int, number: Array, more: More | None = None
) -> tuple[Array, Metrics]:
    """The loss f[] of drafts at places, and metrics.

    The sum over depths d of decay^d (ce * cross-entropy with the text + teacher * divergence from
    the target). Each depth is divided by ``number``, that of labels, so that micro-batches add up.
    The target's logits are constants. ``more`` as in ``term_of``.

    The metrics ``agreement_<d>``, d from 1, are how often draft and target prefer the same token.
    ``scale`` is the sum of the weights of all draft tokens, per labelled position: the loss divided
    by it is a mean per draft token. ``uniform`` is the loss of drafts that give all tokens the same
    probability.
    """
    pace = None
    if keys.pace is not None:
        shape, dtype = drafts.shape, drafts.teacher.dtype
        pace = Pace(jnp.ones(shape, dtype), jnp.zeros((*shape, 3), dtype))
    term = term_of(drafts, keys, number, more)
    again = recomputes(drafts, depths, keys.remat)
    return fold(term, (drafts.state, pace), depths, keys.decay, number, again)


def term_of(drafts: Drafts, keys: LossKeys, number: Array, more: More | None = None) -> Term:
    """The term of one depth, divided by the ``number`` of labels, or 1 if there is none.

    Its carry are the state of the drafts and the ``Pace``. ``more`` gives a term and metrics to
    add.
    """
    first = jnp.maximum(number, 1)

    def term(carry: tuple[Any, Pace | None], depth: Any) -> tuple[Array, Metrics, Any]:
        state, pace = carry
        if pace is not None and depth:
            pace = _continued(pace, drafts.places_of(depth - 1), drafts.places_of(depth))
        logits, state = drafts.step(state, depth)
        labels, teacher = drafts.labels(depth), drafts.teachers(depth)
        value, sizes, pace = compare(keys, first, logits, teacher, *labels, pace, drafts.ids)
        if more is not None:
            added, others = more(first, state, logits, teacher, labels[1])
            value += added
            sizes |= {name: sizes.get(name, 0) + each for name, each in others.items()}
        return value, sizes, (state, pace)

    return term


def recomputes(drafts: Drafts, depths: int, asked: bool, more: int = 0) -> bool:
    """Whether the backward pass computes each depth again; otherwise all logits are in memory.

    Where they take more than ``MOST`` bytes, it does. ``more``: other numbers of each place that
    are in memory with its logits.
    """
    rows, size = drafts.shape
    width = drafts.teacher.shape[-1] if drafts.ids is None else len(drafts.ids)
    return asked or 4 * rows * size * (width + more) * depths > MOST


def fold(
    term: Term, carry: Any, depths: int, decay: float, number: Array, remat: bool
) -> tuple[Array, Metrics]:
    """The sum over depths of decay^depth times their terms, and the metrics of all.

    ``term(carry, depth) -> (f[], sizes, carry)``. Of the sizes, ``scale`` and ``uniform`` are added
    up too, ``labels`` is the number of labels of the depth, and the others are means over these.
    ``remat``: the backward pass computes each depth again, so that the logits of one depth at a
    time are in memory.
    """
    total, metrics = jnp.zeros(()), {"scale": jnp.zeros(()), "uniform": jnp.zeros(())}
    weights = dict.fromkeys(("loss", *metrics), number)
    one = jax.checkpoint(term, static_argnums=1) if remat else term
    for depth in range(depths):
        value, sizes, carry = one(carry, depth)
        labels = sizes.pop("labels")
        total += decay**depth * value
        for name in ("scale", "uniform"):
            metrics[name] += decay**depth * sizes.pop(name)
        means = {f"{name}_{depth + 1}": each for name, each in sizes.items()}
        metrics, weights = metrics | means, weights | dict.fromkeys(means, labels)
    return total, {**metrics, "weight": jax.tree.map(jnp.float32, weights)}


def _continued(pace: Pace, before: Array | None, places: Array | None) -> Pace:
    """The ``Pace`` at these places; those of a later depth are the first ones of the one before."""
    if places is None:
        return pace
    if before is None:
        return jax.tree.map(lambda x: at(x, places), pace)
    return jax.tree.map(lambda x: x[:, : places.shape[1]], pace)


def compare(
    keys: LossKeys,
    first: Array,
    logits: Array,
    target_logits: Array,
    labels: Array,
    counted: Array,
    pace: Pace | None = None,
    ids: np.ndarray | None = None,
) -> tuple[Array, Metrics, Pace | None]:
    """(loss f[] divided by ``first``, metrics, pace of this depth) of one depth.

    ``logits`` f[B,P,V_d], ``target_logits`` f[B,P,V], ``labels`` i32[B,P], ``counted`` bool[B,P].
    The metrics: ``agreement``, how often both prefer the same token; ``labels``, how many count;
    ``scale``, the sum of the weights per label of the first depth; ``uniform``, the loss of a guess
    that gives all tokens the same probability. ``pace`` is that of the depth before; with it the
    sum of the losses of all depths is the weighted one, not each of them.

    Distributions are those over the draft vocabulary, ``ids`` i32[V_d]; None: all tokens. Places at
    which the text (where its probability is needed) or the target's preferred token (with
    ``teacher``) is outside of it are left out of the loss.
    """
    ce, teacher, divergence = keys.ce, keys.teacher, DIVERGENCES[keys.divergence]
    best, kept = sampling.argmax(target_logits), counted
    if ids is not None:
        size = target_logits.shape[-1]
        labels, best = place_of(ids, labels, size), place_of(ids, best, size)
        if ce or pace is not None:
            kept &= labels >= 0
        if teacher:
            kept &= best >= 0
        target_logits, labels = gather(ids, target_logits), jnp.maximum(labels, 0)
    value = jnp.zeros(labels.shape, logits.dtype)
    uniform = jnp.full(labels.shape, ce * jnp.log(logits.shape[-1]), logits.dtype)
    right = None
    if ce or pace is not None:
        log_probs = jax.nn.log_softmax(logits)
        right = jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    if ce and right is not None:
        value -= ce * right
    if teacher:
        value += teacher * divergence(target_logits, logits)
        # [V] only: XLA would fold a constant of the whole shape, slowly.
        uniform += teacher * divergence(target_logits, jnp.zeros(logits.shape[-1]))
    scale = jnp.full_like(uniform, ce + teacher)
    parts = jnp.where(kept[..., None], jnp.stack([value, scale, uniform], -1), 0)
    if pace is not None:
        assert right is not None and isinstance(keys, DepthKeys) and keys.pace is not None
        smooth = (1 - keys.pace) * jnp.exp(jax.lax.stop_gradient(right)) + keys.pace
        pace = Pace(jnp.where(kept, pace.reached * smooth, pace.reached), pace.sums + parts)
        parts = jnp.where(kept, pace.reached, 0)[..., None] * pace.sums
    total, scale, uniform = parts.sum((0, 1)) / first
    same = mean(sampling.argmax(logits) == best, counted)
    sizes = {"agreement": same, "labels": counted.sum(), "scale": scale, "uniform": uniform}
    return total, sizes, pace


# Glancing training of drafters that predict several tokens in one pass (GLAT, 2008.07905). A first
# pass predicts without gradients. In the second one some of the answers are given: as many as were
# wrong, times a rate that changes during training. What was given is not learnt.


def progress(batch: Batch, run_steps: int) -> Any:
    """The share of the run that is over; 0 without ``Batch.step`` or ``run_steps``."""
    if batch.step is None or not run_steps:
        return 0.0
    return batch.step[0] / run_steps


def given_count(wrong: Array, rate: Any) -> Array:
    """i32[B]: how many answers each row is given, for the places bool[B,T] that are wrong."""
    return jnp.floor(rate * wrong.sum(1)).astype(jnp.int32)


def first_free(free: Array, turn: Array, count: Array) -> Array:
    """bool[B,T]: the ``count`` i32[B] places with the lowest ``turn`` [B,T], of the ``free`` ones.

    All free places where there are fewer.
    """
    # Those that are not free come last.
    turn = jnp.where(free, turn, turn.max() + 1)
    rank = jnp.argsort(jnp.argsort(turn, 1), 1)
    return free & (rank < count[:, None])
