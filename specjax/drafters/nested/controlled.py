"""Controlled acceptance: another drafter's cost, and a chosen probability of being right. L1.

For measuring the system apart from the models: every round pays for all that the inner drafter does, and then its tokens are
replaced. At each depth the draft holds the target's own greedy continuation with probability ``rate``, independently, and
a token that greedy decoding would not say otherwise. So at temperature 0 the acceptance rate is ``rate`` at every depth, at any
size of model and with random weights, and the text is still plain greedy decoding's. (A rule that ignores the target, as
vLLM's "synthetic" one, controls acceptance too, but then the text means nothing.)

The continuation is decoded while the prompt is read, before anything is timed. On sampled text the draft is a guess like any
other: nothing is lost, and ``rate`` means nothing; the command line refuses it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import decode, rng, sampling, tree
from specjax.checks import number
from specjax.drafters import none
from specjax.drafters.nested import _stages
from specjax.drafters.nested._stages import Stages
from specjax.errors import UserError
from specjax.types import CHAIN, DETERMINISTIC, LM, DecodeState, Draft, Drafter, ModelParams


class State(struct.PyTreeNode):
    """What is carried: the inner drafter's state, and what the target would say."""

    inner: Any
    record: jax.Array  # i32[B,S] the prompt, then its greedy continuation


def check(drafters: Stages, **_: Any) -> None:
    """Raises UserError unless ``make`` would know the inner drafter and take its keys."""
    _stages.check("controlled", drafters)
    if len(drafters) != 1:
        raise UserError(f"controlled pays for one drafter and was given {len(drafters)}; give one")


def make(target: LM, *, drafters: Stages, rate: float = 0.8) -> Drafter:
    """Drafts with a chosen acceptance rate at another drafter's cost.

    Args:
        target: the model to be accelerated.
        drafters: the one drafter whose cost is paid: label -> its keys, or a list of a ready-made ``Drafter``. A chain, or a
            deterministic tree, of which one node at each depth is controlled and the others are wrong.
        rate: probability that the controlled token of a depth is the target's, in [0, 1].

    Raises:
        UserError: none or several drafters, one that drafts nothing or draws siblings, a rate outside [0, 1].
    """
    check(drafters)
    number("rate", rate, "in [0, 1]", lambda x: 0 <= x <= 1)
    [stage] = _stages.build(target, drafters, gaps=False)
    if not stage.nodes:
        raise UserError(f"controlled: {stage.name} drafts nothing whose cost could be paid")
    if stage.siblings not in (CHAIN, DETERMINISTIC):
        raise UserError(
            f"controlled takes chains and deterministic trees; {stage.name} drafts {stage.siblings} siblings"
        )
    longest = stage.longest

    def own(params: ModelParams) -> ModelParams:
        return params._replace(draft=params.draft["drafter"])

    def init(params, context, target_out, slots):
        inner = stage.init(own(params), context, target_out, slots)
        return State(inner, _continue(target, params, context, slots))

    def propose(params, keys, context, state):
        draft, inner = stage.propose(
            own(params), keys.inner(0, same_target=True), context, state.inner
        )
        batch, depth = context.length.shape[0], jnp.arange(longest)
        coins = keys.inner(1).coins(longest)
        chance = jnp.broadcast_to(params.draft["rate"], (batch, longest))
        right = coins.flip(chance, jnp.ones_like(chance))
        true = jnp.take_along_axis(
            state.record, context.length[:, None] + depth, axis=1, mode="clip"
        )
        said = jnp.where(right, true, (true + 1) % target.vocab_size)
        # Never so, but the compiler cannot know: whatever made the inner tokens has to be computed.
        paid = draft.tokens < -1
        if draft.parents is None:
            return Draft(
                jnp.where(paid, draft.tokens, said), jnp.ones_like(draft.valid), finite=draft.finite
            ), (state.replace(inner=inner))
        level = tree.depths(draft.parents, *draft.tokens.shape)
        main = _first_path(draft, longest)
        at = lambda values: jnp.take_along_axis(values, level, axis=1, mode="clip")  # noqa: E731
        # Another node that said what the controlled one says, or the truth, would spoil the chance: it is withdrawn.
        spoils = ~main & ((draft.tokens == at(true)) | (draft.tokens == at(said)))
        tokens = jnp.where(main & ~paid, at(said), draft.tokens)
        return draft.replace(tokens=tokens, valid=draft.valid & ~spoils, probs=None), state.replace(
            inner=inner
        )

    def update(params, state, draft, verdict, target_out):
        return state.replace(
            inner=stage.update(own(params), state.inner, draft, verdict, target_out)
        )

    return Drafter(
        # A parameter, so that another rate compiles nothing.
        init_params=lambda key: {
            "drafter": stage.init_params(key),
            "rate": jnp.asarray(rate, jnp.float32),
        },
        init=init,
        propose=propose,
        update=update,
        nodes=stage.nodes,
        name="controlled",
        siblings=stage.siblings,
        depth=stage.depth,
        features=True,  # the continuation is the target's own
        gaps=stage.gaps,
        constant_cost=stage.constant_cost,
        greedy_only=True,
    )


def _continue(target: LM, params: ModelParams, context, slots: int) -> jax.Array:
    """i32[B,slots]: the text and the target's greedy continuation of it."""
    batch, width = context.tokens.shape
    tokens = jnp.pad(context.tokens, ((0, 0), (0, slots + 1 - width)), constant_values=-1)
    cache = decode.feed(
        target,
        params.target,
        context.tokens[:, :-1],
        context.length - 1,
        target.init_cache(batch, slots),
    )[1]
    state = DecodeState(
        tokens=tokens,
        length=context.length,
        limit=jnp.full((batch,), slots, jnp.int32),
        done=context.length >= slots,
        failed=jnp.full((batch,), -1, jnp.int32),
        cache=cache,
        draft=(),
        keys=rng.row_keys(0, batch),  # greedy: never drawn from
        round=jnp.zeros((), jnp.int32),
        sampling=sampling.make_sampling(batch, 0.0),
        made_for=none.make(target).tag,
    )
    return jnp.maximum(
        decode.autoregressive(target, params, state, max_steps=slots).tokens[:, :slots], 0
    )


def _first_path(draft: Draft, longest: int) -> jax.Array:
    """bool[B,N]: the path of eldest children from the pending token down."""
    assert draft.parents is not None
    node = jnp.arange(draft.tokens.shape[1])
    there = tree.exists(draft.valid, draft.parents)
    main, above = jnp.zeros_like(there), jnp.full(there.shape[:1], -1)
    for _ in range(longest):
        children = there & (draft.parents == above[:, None])
        eldest = jnp.where(children.any(-1), jnp.argmax(children, -1), -2)
        main, above = main | (node == eldest[:, None]), eldest
    return main
