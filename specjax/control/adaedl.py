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

import jax.numpy as jnp
from flax import struct

from specjax import declare
from specjax.bound import Bound
from specjax.control import _controller
from specjax.control._controller import Ahead, Controller, entropies
from specjax.declare import key, share
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "agrawal2024adaedl"


class State(struct.PyTreeNode):
    """What a row keeps from round to round."""

    threshold: Array  # f32[B]
    share: Array  # f32[B] the mean of the accepted shares


class Keys(declare.Keys, owner="adaedl's "):
    """The keys of ``adaedl``."""

    start: float = share(0.4, "the first threshold")
    target: float = share(
        0.9, "the share of accepted tokens at which the threshold moves from rising to falling"
    )
    step: float = share(0.01, "how far the aim is from the threshold")
    scale: float = key(0.2, "the factor of the entropy", above=0)
    keep: float = share(0.9, "share of the old threshold in the new one")
    memory: float = share(
        0.5,
        "share of the earlier rounds in the mean of the accepted shares, which begins at the "
        "target",
    )


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """Goes on while the bound of the acceptance is at least a threshold that follows acceptance.

    Raises:
        UserError: a number outside [0, 1], a scale that is not positive.
    """
    ask, init = Bound(_ask, keys.scale), Bound(_init, keys.start, keys.target)
    return Controller(f"adaedl:{keys.start:g}", ask, init, Bound(_update, keys))


def _init(start: float, target: float, context: Context) -> State:
    full = Bound(jnp.full, context.length.shape, dtype=jnp.float32)
    return State(full(start), full(target))


def _ask(scale: float, state: State, ahead: Ahead) -> tuple[Array, State]:
    bound = 1 - jnp.sqrt(scale * entropies(ahead.logits))
    return ((bound >= state.threshold[:, None]) & ahead.valid).any(-1), state


def _update(keys: Keys, state: State, draft: Draft, verdict: Verdict) -> State:
    drafted = _controller.drafted(draft)
    return State(*_controller.moved(keys, state, verdict, drafted, jnp.ones(drafted.shape, bool)))
