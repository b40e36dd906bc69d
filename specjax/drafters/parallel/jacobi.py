"""Jacobi decoding: the target's outputs after the last draft are the next draft.

No weights, no extra pass, L1. Santilli et al. 2023 (2305.10427). A block of guesses y is replaced
by the target's tokens after each prefix of y. The text of plain decoding is the fixed point of this
map, and each round makes at least one more token correct.

For sampled rows the target's token (``seeded``) is the one that its own sampler draws at that
position. The sampler's noise is keyed by position, so this is also a map with a fixed point, and
with the rule ``match`` the output equals plain decoding with the same keys bit for bit. With the
other rules for chains the class is L1 too: a draft is a function of the text, of earlier rounds and
of that noise, and a round's coins and residual draws are independent of all three.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import outcome, sampling
from specjax.bound import Bound
from specjax.checks import one_of, whole, yes_or_no
from specjax.drafters.parallel._pieces import pieces
from specjax.types import LM, Draft, Drafter

REFERENCE = "santilli2023accelerating"


class State(struct.PyTreeNode):
    """The target's outputs of the last round: after the pending token and after each draft token.

    Output i is for text position ``start + i``.
    """

    best: jax.Array  # i32[B,gamma+1] argmax
    logits: jax.Array | None  # f32[B,gamma+1,V]; None unless seeded
    start: jax.Array  # i32[B] text position of the first output
    proposed: jax.Array  # i32[B] the same for the current round


class Settings(NamedTuple):
    """Static settings; see ``make``."""

    vocab_size: int
    gamma: int
    seeded: bool
    start: str


def make(target: LM, *, gamma: int = 5, seeded: bool = True, start: str = "last") -> Drafter:
    """Drafts with the target's own outputs of the last round.

    Args:
        target: any model; only its vocabulary's size is read.
        gamma: draft tokens per round.
        seeded: whether sampled rows guess with the target's own noise (costs the memory of a
            round's logits and one more softmax); False: with the argmax. Greedy rows always take
            the argmax.
        start: the guess for positions without an output: "last" repeats the last guess (at first
            the pending token), "prompt" copies tokens of the row's own text.

    Raises:
        UserError: gamma below 1, unknown ``start``, ``seeded`` neither true nor false.
    """
    whole("gamma", gamma, 1)
    one_of("start", start, ("last", "prompt"))
    yes_or_no("seeded", seeded)
    settings = Settings(target.vocab_size, gamma, seeded, start)
    return Drafter(
        init_params=lambda key: {},
        init=Bound(_init, settings),
        propose=Bound(_propose, settings),
        update=_update,
        nodes=settings.gamma,
        name="jacobi",
        whole=True,
        features=True,
        history=True,
    )


def _init(settings: Settings, params, context, target_out, slots):
    batch, gamma = context.length.shape[0], settings.gamma
    logits = None
    if settings.seeded:
        # Always float32: the models' logits are, and a guess needs no more.
        logits = jnp.zeros((batch, gamma + 1, settings.vocab_size), jnp.float32)
    return State(
        best=jnp.zeros((batch, gamma + 1), jnp.int32),
        logits=logits,
        # No output is for a position that is drafted next.
        start=context.length - gamma - 1,
        proposed=context.length,
    )


def _propose(settings: Settings, params, keys, context, state):
    gamma, ahead = settings.gamma, jnp.arange(settings.gamma)
    # The output for each draft position.
    index = (context.length - state.start)[:, None] + ahead
    known, index = index <= gamma, jnp.clip(index, 0, gamma)

    def best():
        return jnp.take_along_axis(state.best, index, 1)

    def drawn():
        logits = jnp.take_along_axis(state.logits, index[..., None], 1)
        probs = outcome.target_probs(logits, context.sampling)
        return sampling.draw_rows(keys.at_position(ahead), probs)

    all_greedy = jnp.all(context.sampling.greedy)
    outputs = jax.lax.cond(all_greedy, best, drawn) if settings.seeded else best()
    if settings.start == "last":
        newest = jnp.maximum(known.sum(-1, keepdims=True) - 1, 0)
        last = jnp.take_along_axis(outputs, newest, 1)
        rest = jnp.where(known.any(-1, keepdims=True), last, context.pending[:, None])
    else:
        places = context.length[:, None] + ahead
        rest = pieces(context.tokens, context.length, places, 1)[..., 0]
    tokens = jnp.where(known, outputs, rest)
    draft = Draft(tokens=tokens, valid=jnp.ones_like(tokens, bool))
    return draft, state.replace(proposed=context.length)


def _update(params, state, draft, verdict, target_out):
    moved = (verdict.count > 0)[:, None]
    logits = state.logits
    if logits is not None:
        logits = jnp.where(moved[..., None], target_out.logits.astype(logits.dtype), logits)
    return State(
        best=jnp.where(moved, sampling.argmax(target_out.logits), state.best),
        logits=logits,
        start=jnp.where(moved[:, 0], state.proposed, state.start),
        proposed=state.proposed,
    )
