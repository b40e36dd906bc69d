"""Goes on while the expected tokens per second rise, by calibrated confidences. Per row.

The scheduler of DSpark (2607.05147, algorithm 1, for one row). The confidence c_j is the chance
that the token at depth j is accepted if those before it were, so the product of the first j
survives with s_j. A draft of k tokens is expected to emit 1 + s_1 + ... + s_k tokens in the time of
such a round; it ends at the first k at which this rate does not rise. A confidence is known before
its token is drawn, and depends on the tokens before it alone, so the output law does not change.
(To choose the best length afterwards, among the confidences of drawn tokens, would change it:
appendix A.)

The confidence is the drafter's own (``Ahead.confidence``); without one, the highest probability of
the draft. Confidences are usually too high, and their product more so. ``profile`` holds a
temperature for each depth that was fitted to measured acceptance one depth after the other
(``theory.calibration``); without a profile they are taken as they are.

A tree stops as a whole: its survival is that of its best place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import declare
from specjax.bound import Bound
from specjax.control import _controller
from specjax.control import costs as costs_lib
from specjax.control._controller import Ahead, Controller
from specjax.control.costs import Costs, Known, RoundCosts
from specjax.declare import key
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "cheng2026dspark"


class State(struct.PyTreeNode):
    """Of the draft that grows."""

    greedy: Array  # bool[B] the rows without sampling
    survival: Array  # f32[B] the product of the confidences so far
    tokens: Array  # f32[B] the expected tokens of the round so far


class Keys(declare.Keys, owner="calibrated's "):
    """The keys of ``calibrated``."""

    profile: str = key(
        "",
        f"{costs_lib.PROFILE}: times, and temperatures of the confidences; "
        '"": the next three keys, and no calibration',
    )
    most: int | None = key(None, "the longest draft; None: that of the profile, or 16")
    draft: float | None = costs_lib.cost_key("drafting one more token", costs_lib.DRAFT)
    verify: float | None = costs_lib.verify_key(costs_lib.LEVELS)


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """Goes on while expected tokens over time rise.

    Raises:
        UserError: a number out of range, a profile that cannot be read or lacks the batch size.
    """
    known = costs_lib.known(keys, 16)
    more = {"check_rows": costs_lib.check_rows(known), "lengths": costs_lib.lengths(known)}
    return Controller("calibrated", Bound(_ask, known), _init, **more)


def _init(context: Context) -> State:
    ones = jnp.ones(context.length.shape, jnp.float32)
    return State(jnp.asarray(context.sampling.greedy, bool), ones, ones)


def _filled(costs: Costs) -> Costs:
    """With a time for every length up to the longest, and a temperature for every depth."""

    def kind(own: RoundCosts) -> RoundCosts:
        times = np.interp(np.arange(costs.longest + 1), costs.lengths, own.times)
        return own._replace(times=tuple(times.tolist()), heats=own.heats or (1.0,) * costs.longest)

    return costs._replace(greedy=kind(costs.greedy), sampled=kind(costs.sampled))


def _ask(known: Known, state: State, ahead: Ahead) -> tuple[Array, State]:
    costs = _filled(costs_lib.known_of(known, len(state.greedy)))
    times, heats = (costs.each(name, state.greedy) for name in ("times", "heats"))
    longest = costs.longest
    depth = jnp.asarray(ahead.depth, jnp.int32)
    survival, tokens = (jnp.where(depth == 0, 1, x) for x in (state.survival, state.tokens))
    here = jnp.minimum(depth, longest - 1)
    sure = _confidence(ahead)
    logit = jnp.log(sure) - jnp.log1p(-jnp.minimum(sure, 1 - 1e-6))
    sure = jax.nn.sigmoid(logit / heats[:, here, None])
    survival = survival * jnp.where(ahead.valid, sure, 0).max(-1)
    more = tokens + survival
    rises = more * times[:, here] > tokens * times[:, here + 1]
    new = state.replace(survival=survival.astype(jnp.float32), tokens=more.astype(jnp.float32))
    return rises & (depth < longest), new


def _confidence(ahead: Ahead) -> Array:
    """f32[B,n]: the chance that the next token at each place is accepted, by the drafter."""
    if ahead.confidence is not None:
        return ahead.confidence.astype(jnp.float32)
    logits = ahead.logits.astype(jnp.promote_types(ahead.logits.dtype, jnp.float32))
    highest = 1 / jnp.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
    return jnp.broadcast_to(highest, ahead.valid.shape).astype(jnp.float32)


class Recorded(struct.PyTreeNode):
    """The confidences of a row's last rounds, and what was accepted: to fit temperatures to."""

    now: Array  # f32[B,K] of the draft that grows; -1: none
    confidences: Array  # f32[B,R,K] of the rounds so far; -1: no token
    accepted: Array  # i32[B,R] levels; -1: no round yet
    rounds: Array  # i32[B]


def recorder(longest: int, rounds: int) -> Controller:
    """Full drafts of ``longest`` levels; its state has the confidences of ``rounds`` rounds."""
    return Controller("recorder", _record, Bound(_begin, longest, rounds), _recorded)


def _begin(longest: int, rounds: int, context: Context) -> Recorded:
    batch = len(context.length)
    return Recorded(
        jnp.full((batch, longest), -1, jnp.float32),
        jnp.full((batch, rounds, longest), -1, jnp.float32),
        jnp.full((batch, rounds), -1, jnp.int32),
        jnp.zeros((batch,), jnp.int32),
    )


def _record(state: Recorded, ahead: Ahead) -> tuple[Array, Recorded]:
    sure = jnp.where(ahead.valid, _confidence(ahead), -1).max(-1)
    here = jnp.arange(state.now.shape[1]) == jnp.asarray(ahead.depth)
    return jnp.ones(sure.shape, bool), state.replace(now=jnp.where(here, sure[:, None], state.now))


def _recorded(state: Recorded, draft: Draft, verdict: Verdict) -> Recorded:
    rounds, longest = state.confidences.shape[1:]
    levels = _controller.drafted(draft)[:, None]
    now = jnp.where(jnp.arange(longest) < levels, state.now, -1)
    here = jnp.arange(rounds) == (state.rounds % rounds)[:, None]
    empty = jnp.full_like(now, -1)
    confidences = jnp.where(here[..., None], now[:, None], state.confidences)
    accepted = jnp.where(here, _controller.accepted(verdict)[:, None], state.accepted)
    return Recorded(empty, confidences, accepted, state.rounds + 1)
