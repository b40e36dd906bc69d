"""Jacobi decoding: the target's outputs after last round's draft are this round's draft. No weights, no extra pass, L1.

Santilli et al. 2023 (2305.10427), card C5. The block of guesses y is replaced by what the target says after each of its
prefixes; the text that plain decoding gives is the fixed point of this map, and each round makes at least one more token right.

For rows that are sampled, "what the target says" is (``seeded``) the token that its own sampler draws there: noise is keyed by
position, so this too is a map with a fixed point, and with the rule ``match`` the output is, bit for bit, plain decoding with
the same keys. With the other rules for chains the class is L1 as well: a draft is a function of the text, of earlier rounds and
of that noise, and a round's coins and residual draws are independent of all three.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct

from specjax import sampling, step
from specjax.checks import one_of, whole
from specjax.drafters.parallel._pieces import pieces
from specjax.errors import UserError
from specjax.types import LM, Draft, Drafter


class State(struct.PyTreeNode):
    """What the target said in the last round, after the token before text position ``start`` and the draft that followed."""

    best: jax.Array  # i32[B,gamma+1] argmax
    logits: jax.Array | None  # f32[B,gamma+1,V]; None unless seeded
    start: jax.Array  # i32[B] the text position that the first of them speaks of
    proposed: jax.Array  # i32[B] the same for the round that is under way


@functools.cache  # equal arguments, the same drafter: nothing is compiled twice
def make(target: LM, *, gamma: int = 5, seeded: bool = True, start: str = "last") -> Drafter:
    """Drafts with the target's own outputs of the round before.

    Args:
        target: any model; only its vocabulary's size is read.
        gamma: draft tokens per round.
        seeded: whether rows that are sampled guess with the target's own noise (costs the memory of a round's logits, and one
            more softmax); False: with the argmax. Greedy rows always take the argmax.
        start: what is guessed for positions that no output speaks of: "last" repeats the last guess (at first the pending
            token), "prompt" copies tokens from the row's own text.

    Raises:
        UserError: gamma below 1, unknown ``start``, ``seeded`` neither true nor false.
    """
    whole("gamma", gamma, 1)
    one_of("start", start, ("last", "prompt"))
    if not isinstance(seeded, bool):
        raise UserError(f"seeded is {seeded!r}; it must be True or False")
    ahead = jnp.arange(gamma)

    def init(params, context, target_out, slots):
        batch = context.length.shape[0]
        return State(
            best=jnp.zeros((batch, gamma + 1), jnp.int32),
            # Always float32: the models' logits are, and a guess needs no more.
            logits=jnp.zeros((batch, gamma + 1, target.vocab_size), jnp.float32)
            if seeded
            else None,
            start=context.length - gamma - 1,  # nothing was said about what comes now
            proposed=context.length,
        )

    def propose(params, keys, context, state):
        index = (context.length - state.start)[
            :, None
        ] + ahead  # the output that speaks of each draft position
        known, index = index <= gamma, jnp.clip(index, 0, gamma)

        def best():
            return jnp.take_along_axis(state.best, index, 1)

        def drawn():
            law = step.target_probs(
                jnp.take_along_axis(state.logits, index[..., None], 1), context.sampling
            )
            return sampling.draw_rows(keys.at_position(ahead), law)

        said = jax.lax.cond(jnp.all(context.sampling.greedy), best, drawn) if seeded else best()
        if start == "last":
            last = jnp.take_along_axis(said, jnp.maximum(known.sum(-1, keepdims=True) - 1, 0), 1)
            rest = jnp.where(known.any(-1, keepdims=True), last, context.pending[:, None])
        else:
            rest = pieces(context.tokens, context.length, context.length[:, None] + ahead, 1)[
                ..., 0
            ]
        tokens = jnp.where(known, said, rest)
        return Draft(tokens=tokens, valid=jnp.ones_like(tokens, bool)), state.replace(
            proposed=context.length
        )

    def update(params, state, draft, verdict, target_out):
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

    return Drafter(
        init_params=lambda key: {},
        init=init,
        propose=propose,
        update=update,
        nodes=gamma,
        name="jacobi",
        features=True,
    )
