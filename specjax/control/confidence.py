"""Stops a draft after a token of low probability; the threshold may be refitted. Per row.

Transformers' assisted generation with ``assistant_confidence_threshold`` (Mamou et al. 2024,
2405.04304; 0.4 by default): a draft ends after the first token whose probability is below the
threshold. That token stays in the draft and is tested. The probability is the draft's own, without
the row's temperature and cut-offs.

With ``refit``, as in transformers, every round chooses the threshold anew among the probabilities
of the row's last tested tokens: the one that minimises FPR + 3 FNR, the shares of rejected tokens
at or above it and of accepted ones below it. It takes more than five tokens, of both kinds. The
last token of a draft of full length is not among them, as no question follows it. Transformers
keeps all tokens and the threshold for the next prompt; here a row keeps the last ``memory`` tokens
and begins anew.

A tree stops as a whole: after a level without a token above the threshold. It is never refitted: of
most of its tokens it is not known whether they would be accepted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax import declare
from specjax.bound import Bound
from specjax.control import _controller
from specjax.control._controller import Ahead, Controller
from specjax.declare import key, share
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "mamou2024dynamic"

# A refit takes more than so many tokens; a missed token weighs so much against a wrong one.
LEAST_TOKENS, MISS_WEIGHT = 5, 3.0
DEEPEST = 64  # levels of a draft that are recorded


class State(struct.PyTreeNode):
    """What a row keeps from round to round, and of the draft that grows."""

    threshold: Array  # f32[B]
    probs: Array  # f32[B,D] of the tokens of the draft that grows; -1: not known
    tested: Array  # f32[B,H] probabilities of the last tested tokens; -1: none yet
    passed: Array  # bool[B,H] whether they were accepted
    count: Array  # i32[B] how many were written


class Keys(declare.Keys, owner="confidence's "):
    """The keys of ``confidence``."""

    threshold: float = share(0.4, "the probability; the first one, with ``refit``")
    refit: int = key(
        0,
        "1: the threshold follows the row's tested tokens; only for chains. 0: it stays.",
        least=0,
        most=1,
    )
    memory: int = key(64, "how many tested tokens a row keeps for that", least=LEAST_TOKENS + 1)


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """Goes on after tokens of at least ``threshold``.

    Raises:
        UserError: a threshold outside [0, 1], ``refit`` other than 0 or 1, ``memory`` below 6.
    """
    name = f"confidence:{keys.threshold:g}" + (",1" if keys.refit else "")
    if not keys.refit:
        return Controller(name, Bound(_ask_constant, keys.threshold))
    return Controller(name, _ask, Bound(_init, keys.threshold, keys.memory), _update)


def _ask_constant(threshold: float, state: tuple, ahead: Ahead) -> tuple[Array, tuple]:
    # The pending token has probability 1, so every draft has a first token.
    return ((jnp.exp(ahead.token_log_prob) >= threshold) & ahead.valid).any(-1), state


def _init(threshold: float, memory: int, context: Context) -> State:
    batch = context.length.shape[0]
    return State(
        jnp.full((batch,), threshold, jnp.float32),
        jnp.full((batch, DEEPEST), -1, jnp.float32),
        jnp.full((batch, memory), -1, jnp.float32),
        jnp.zeros((batch, memory), bool),
        jnp.zeros((batch,), jnp.int32),
    )


def _ask(state: State, ahead: Ahead) -> tuple[Array, State]:
    prob = jnp.where(ahead.valid, jnp.exp(ahead.token_log_prob), 0).max(-1)
    # The token of level ``depth``; the pending token, at depth 0, belongs to no level.
    here = jnp.arange(DEEPEST) == jnp.asarray(ahead.depth) - 1
    single = ahead.valid.shape[1] == 1
    probs = jnp.where(here & single, prob[:, None], state.probs).astype(jnp.float32)
    return prob >= state.threshold, state.replace(probs=probs)


def _update(state: State, draft: Draft, verdict: Verdict) -> State:
    memory, accepted = state.tested.shape[1], _controller.accepted(verdict)
    tested = jnp.minimum(accepted + 1, _controller.drafted(draft))
    level = jnp.arange(DEEPEST)
    known = (level < tested[:, None]) & (state.probs >= 0)
    # The place of each tested token in the ring; others are written outside of it.
    place = (state.count[:, None] + jnp.cumsum(known, -1) - 1) % memory
    place = jnp.where(known, place, memory)
    put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
    probs = put(state.tested, place, state.probs)
    passed = put(state.passed, place, level < accepted[:, None])
    threshold = _fitted(probs, passed, state.threshold)
    empty = jnp.full_like(state.probs, -1)
    return State(threshold, empty, probs, passed, state.count + known.sum(-1))


def _fitted(probs: Array, passed: Array, threshold: Array) -> Array:
    """The threshold f32[B] for the tokens of probabilities f32[B,H] that passed, bool[B,H]."""
    known = probs >= 0
    good, bad = known & passed, known & ~passed
    above = probs[:, None, :] >= probs[:, :, None]  # [B, candidate, token]
    wrong = (above & bad[:, None]).sum(-1) / jnp.maximum(bad.sum(-1), 1)[:, None]
    missed = (~above & good[:, None]).sum(-1) / jnp.maximum(good.sum(-1), 1)[:, None]
    cost = jnp.where(known, wrong + MISS_WEIGHT * missed, jnp.inf)
    # The highest of equally good thresholds, as the first point of a ROC curve.
    best = jnp.where(cost <= cost.min(-1, keepdims=True), probs, -1).max(-1)
    enough = (known.sum(-1) > LEAST_TOKENS) & good.any(-1) & bad.any(-1)
    return jnp.where(enough, best, threshold).astype(threshold.dtype)
