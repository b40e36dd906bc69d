"""Stops a draft where a lower bound of the acceptance, from the entropy, is low. Per row.

AdaEDL (Agrawal et al. 2024, 2410.18351): the next token is drafted if 1 - sqrt(scale H) is at least
the threshold, with H the entropy of its distribution in nats. It is asked before the token is
drawn. The probabilities are the draft's own, without the row's temperature and cut-offs.

After every round with a draft the threshold moves towards the acceptance that is aimed at, as in
Draft & Verify. r is the mean of the rounds' accepted shares, in which each round counts ``memory``
times as much as the next one. The aim is the threshold plus ``step`` where r is below ``target``,
otherwise the threshold minus ``step``; the new threshold is ``keep`` parts of the old one and
1 - ``keep`` parts of the aim, in [0, 1]. (The paper's own constants are not known to us; these are
those of Draft & Verify.) ``step=0`` keeps the threshold.

A tree stops as a whole: when the bound is low at all places of a level.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax.bound import Bound
from specjax.control import _counts
from specjax.control._types import Ahead, Controller
from specjax.control.entropy import entropies
from specjax.types import Context, Draft, Verdict

REFERENCE = "agrawal2024adaedl"


class State(struct.PyTreeNode):
    """What a row keeps from round to round."""

    threshold: jax.Array  # f32[B]
    share: jax.Array  # f32[B] the mean of the accepted shares


def make(
    *,
    start: float = 0.4,
    target: float = 0.9,
    step: float = 0.01,
    scale: float = 0.2,
    keep: float = 0.9,
    memory: float = 0.5,
) -> Controller:
    """Goes on while the bound of the acceptance is at least a threshold that follows acceptance.

    Args:
        start: the first threshold.
        target: the share of accepted tokens at which the threshold moves from rising to falling.
        step: how far the aim is from the threshold.
        scale: the factor of the entropy.
        keep: share of the old threshold in the new one.
        memory: share of the earlier rounds in the mean of the accepted shares, which begins at the
            target.

    Raises:
        UserError: a number outside [0, 1], a scale that is not positive.
    """
    mover = _counts.Mover(target, step, keep, memory)
    mover.check("adaedl")
    _counts.share("adaedl's start", start)
    _counts.positive("adaedl's scale", scale)
    return Controller(
        f"adaedl:{start:g}",
        Bound(_ask, scale),
        Bound(_init, start, target),
        Bound(_update, mover),
    )


def _init(start: float, target: float, context: Context) -> State:
    full = Bound(jnp.full, context.length.shape, dtype=jnp.float32)
    return State(full(start), full(target))


def _ask(scale: float, state: State, ahead: Ahead) -> tuple[jax.Array, State]:
    bound = 1 - jnp.sqrt(scale * entropies(ahead.logits))
    return ((bound >= state.threshold[:, None]) & ahead.valid).any(-1), state


def _update(mover: _counts.Mover, state: State, draft: Draft, verdict: Verdict) -> State:
    drafted = _counts.drafted(draft)
    newest = _counts.accepted(verdict) / jnp.maximum(drafted, 1)
    moved = mover.moved(state.threshold, state.share, newest, jnp.ones(drafted.shape, bool))
    return jax.tree.map(lambda a, b: jnp.where(drafted > 0, a, b), State(*moved), state)
