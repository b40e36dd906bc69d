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

import jax
import jax.numpy as jnp
from flax import struct

from specjax import declare, outcome, sampling
from specjax.bound import Bound
from specjax.declare import key
from specjax.types import LM, Array, Draft, Drafter

REFERENCE = "santilli2023accelerating"


class State(struct.PyTreeNode):
    """The target's outputs of the last round: after the pending token and after each draft token.

    Output i is for text position ``start + i``.
    """

    best: Array  # i32[B,gamma+1] argmax
    logits: Array | None  # f32[B,gamma+1,V]; None unless seeded
    start: Array  # i32[B] text position of the first output
    proposed: Array  # i32[B] the same for the current round


class Keys(declare.Keys):
    """The keys of ``jacobi``."""

    gamma: int = key(5, "draft tokens per round", least=1)
    seeded: bool = key(
        True,
        "whether sampled rows guess with the target's own noise (costs the memory of a round's "
        "logits and one more softmax); False: with the argmax. Greedy rows always take the "
        "argmax.",
    )
    start: str = key(
        "last",
        'the guess for positions without an output: "last" repeats the last guess (at first the'
        ' pending token), "prompt" copies tokens of the row\'s own text',
        choices=("last", "prompt"),
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with the target's own outputs of the last round.

    Raises:
        UserError: gamma below 1, unknown ``start``, ``seeded`` neither true nor false.
    """
    return Drafter(
        init=Bound(_init, keys, target.vocab_size),
        propose=Bound(_propose, keys),
        update=_update,
        nodes=keys.gamma,
        name="jacobi",
        whole=True,
        features=True,
        history=True,
    )


def _init(settings: Keys, vocab_size: int, params, context, target_out, slots):
    batch, gamma = context.length.shape[0], settings.gamma
    # Always float32: the models' logits are, and a guess needs no more.
    logits = jnp.zeros((batch, gamma + 1, vocab_size), jnp.float32) if settings.seeded else None
    return State(
        best=jnp.zeros((batch, gamma + 1), jnp.int32),
        logits=logits,
        # No output is for a position that is drafted next.
        start=context.length - gamma - 1,
        proposed=context.length,
    )


def _propose(settings: Keys, params, keys, context, state):
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


# Pieces of a row's own text at pseudo-random places: a drafter's first guesses for tokens.


def pieces(tokens: Array, length: Array, places: Array, size: int) -> Array:
    """One piece of the text for each text position in ``places``.

    A piece begins at a hash of the position. So no key is needed, and a row's pieces do not depend
    on its batch. A piece that reaches the end of the text continues at the beginning.

    Args:
        tokens, length: the texts, i32[B,S] and i32[B].
        places: i32[B,n] text positions.
        size: tokens of a piece.

    Returns:
        i32[B,n,size].
    """
    # Knuth's multiplicative hash.
    scattered = (places.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 8
    start = (scattered % length[:, None].astype(jnp.uint32)).astype(jnp.int32)
    index = (start[..., None] + jnp.arange(size)) % length[:, None, None]
    return jnp.take_along_axis(tokens, index.reshape(len(tokens), -1), 1).reshape(index.shape)
