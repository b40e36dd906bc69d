"""Rounds without drafts that are known before they begin: the drafter is left out."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import step as step_lib
from specjax import tree
from specjax.errors import UserError
from specjax.outcome import EosId
from specjax.types import (
    LM,
    Accept,
    DecodeState,
    Draft,
    Drafter,
    ModelParams,
    Records,
    Rest,
    StepInfo,
    same_state,
)


def resting(rest: Rest, state: DecodeState) -> jax.Array:
    """bool[]: whether the next round may be an ``idle_step``; ``rest`` is the drafter's."""
    return (rest.rows(state.draft) | state.done).all()


def idle_step(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    *,
    eos_id: EosId = None,
) -> tuple[DecodeState, StepInfo]:
    """``speculative_step`` for a round in which all rows rest (``Rare.rest``), at less cost.

    It emits the same tokens, apart from rounding.
    """
    assert drafter.rare.rest is not None
    keys, draft = step_lib.keys_of(drafter, state), _no_draft(drafter, params, state)
    context = step_lib.context_of(state)
    state = state.replace(draft=drafter.rare.rest.idle(params, keys, context, state.draft))
    # There is no draft whose computation the verification could go on from.
    drafter = drafter._replace(rare=drafter.rare._replace(lower=None))
    fixed = step_lib.Round(target, drafter, accept, keys, eos_id)
    return step_lib.verify(fixed, params, state, draft, empty=True)


def idle_steps(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    records: Records,
    step: jax.Array,
    *,
    most: jax.Array | int,
    eos_id: EosId = None,
) -> tuple[DecodeState, Records, jax.Array]:
    """Idle rounds from number ``step`` on, until a row ends or may draft: state, records, rounds.

    For a drafter with ``Rest.lasting``: its state changes once for all these rounds, so each of
    them has the operations of plain decoding. ``most`` i32[] bounds the number of a round.
    """
    rest = drafter.rare.rest
    assert rest is not None and rest.lasting is not None
    most = most - step
    lasting = rest.lasting.rounds(state.draft, ~state.done)
    # At least one, so that the loop around ends.
    most = jnp.clip(jnp.where(state.done, most, lasting).min(), 1, most)
    # Without nodes nothing is reserved for accepted tokens.
    draft = tree.first_nodes(_no_draft(drafter, params, state), 0)
    bare = drafter._replace(
        nodes=0, depth=0, update=same_state, rare=drafter.rare._replace(lower=None)
    )

    def goes_on(carry: tuple[DecodeState, jax.Array]) -> jax.Array:
        now, rounds = carry
        return (rounds < most) & (now.done == state.done).all()

    def one(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        now, rounds = carry
        fixed = step_lib.Round(target, bare, accept, step_lib.keys_of(drafter, now), eos_id)
        return step_lib.verify(fixed, params, now, draft, empty=True)[0], rounds + 1

    after, rounds = jax.lax.while_loop(goes_on, one, (state, jnp.zeros_like(step)))
    place = jnp.arange(len(records.emitted))[:, None] - step
    here = (place >= 0) & (place < rounds) & ~state.done
    # A row emits one token per round, and none in a round that fails.
    emitted = here & (place < after.length - state.length)
    records = records._replace(emitted=records.emitted + emitted, verified=records.verified + here)
    ran = jnp.where(state.done, 0, rounds)
    after = after.replace(draft=rest.lasting.after(after.draft, ran))
    return after, records, step + rounds


def _no_draft(drafter: Drafter, params: ModelParams, state: DecodeState) -> Draft:
    """A draft without valid nodes, as the drafter's are."""
    keys, context = step_lib.keys_of(drafter, state), step_lib.context_of(state)
    draft, _ = tree.zeros(drafter.propose, params, keys, context, state.draft)
    if draft.fed is not None:
        raise UserError(
            f"{drafter.name} has nodes that the target is always fed (Draft.fed), and a rest, in "
            "which it is not; give the drafter no rest"
        )
    if draft.parents is not None:
        draft = draft.replace(parents=jnp.full_like(draft.parents, -1))
    if draft.finite is not None:
        draft = draft.replace(finite=jnp.ones_like(draft.finite))
    return draft
