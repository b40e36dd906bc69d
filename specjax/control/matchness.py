"""Stops a draft after a token that the draft model was unsure of; the threshold adapts. Per row.

The stopping rule of Draft & Verify (Zhang et al. 2023, 2309.08168, section 3.3): after a token
whose probability is below the threshold the draft ends. That token itself stays in the draft and is
tested: the length of a draft depends only on tokens that the target sees, so the output law does
not change. (To leave the token out would make a token's presence depend on its own value.) The
probability is the draft's own, without the row's temperature and cut-offs, as in the authors' code.

After every round the threshold moves. With r the mean of the rounds' accepted shares, in which each
round counts ``memory`` times as much as the next one, the aim is the threshold plus ``step`` where
r is below ``target``; otherwise the threshold minus ``step``, or unchanged if the draft had full
length. The new threshold is ``keep`` parts of the old one and 1 - ``keep`` parts of the aim. Unlike
the authors', it stays in [0, 1]: otherwise a long time of rejections takes it far above 1, and a
draft would have one token for as long afterwards.

A tree stops as a whole: when the token at each place of a level is below the threshold. Accepted
and drafted tokens are then counted as levels.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from specjax import declare
from specjax.bound import Bound
from specjax.control import _controller
from specjax.control._controller import Ahead, Controller
from specjax.declare import share
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "zhang2024draft"


class State(struct.PyTreeNode):
    """What a row keeps from round to round, and of the draft that grows."""

    threshold: Array  # f32[B]
    share: Array  # f32[B] the mean of the accepted shares, newer rounds count more
    levels: Array  # i32[B] levels of the draft; 0: nothing was drafted since the last round
    stopped: Array  # bool[B] whether the draft ended before its full length


class Keys(declare.Keys, owner="matchness's "):
    """The keys of ``matchness``."""

    start: float = share(
        0.8, "the first threshold; the authors take 0.8 for greedy decoding and 0.5 for sampling"
    )
    target: float = share(0.9, "the share of accepted tokens at which the threshold stays")
    step: float = share(0.01, "how far the aim is from the threshold")
    keep: float = share(0.9, "share of the old threshold in the new one; 1 keeps ``start``")
    memory: float = share(
        0.5, "share of the earlier rounds in the mean of the accepted shares, which begins at 0"
    )


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """Continues after tokens of at least a probability that follows the acceptance of the row.

    Raises:
        UserError: a number outside [0, 1].
    """
    return Controller(
        f"matchness:{keys.start:g}",
        _ask,
        Bound(_init, keys.start),
        Bound(_update, keys),
    )


def _init(start: float, context: Context) -> State:
    batch = context.length.shape[0]
    return State(
        jnp.full((batch,), start, jnp.float32),
        jnp.zeros((batch,), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch,), bool),
    )


def _ask(state: State, ahead: Ahead) -> tuple[Array, State]:
    # The pending token has probability 1, so every draft has a first token.
    sure = jnp.exp(ahead.token_log_prob) >= state.threshold[:, None]
    goes_on = (sure & ahead.valid).any(-1)
    levels = jnp.asarray(ahead.depth, jnp.int32) + goes_on.astype(jnp.int32)
    return goes_on, state.replace(levels=levels, stopped=~goes_on)


def _update(keys: Keys, state: State, draft: Draft, verdict: Verdict) -> State:
    moved = _controller.moved(keys, state, verdict, state.levels, state.stopped)
    return State(*moved, jnp.zeros_like(state.levels), jnp.zeros_like(state.stopped))
