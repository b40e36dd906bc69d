"""One round from the host, for checks that look at the drafts and states between two rounds."""

from __future__ import annotations

from typing import Any

from specjax import rng, step
from specjax.types import LM, Accept, DecodeState, Draft, Drafter, ModelParams, StepInfo


def propose(drafter: Drafter, params: ModelParams, state: DecodeState) -> Draft:
    """The draft of the next round, as the drafter gives it."""
    keys = rng.RowKeys(state.keys, state.round, state.length, nodes=drafter.nodes)
    return drafter.propose(params, keys, step.context_of(state), state.draft)[0]


def play(
    target: LM, drafter: Drafter, rule: Accept, params: ModelParams, state: DecodeState
) -> tuple[DecodeState, StepInfo]:
    """One round."""
    return step.speculative_step(target, drafter, rule, params, state)


def judge(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    state: DecodeState,
    keys: Any,
    draft: Draft,
    draft_state: Any,
) -> tuple[DecodeState, StepInfo]:
    """The part of a round after the draft, which is given. All nodes are verified."""
    given = drafter._replace(propose=lambda *_: (draft, draft_state))
    draft, draft_state = step.propose(target, given, params, state, keys)
    after = state.replace(draft=draft_state)
    widest = (drafter.nodes + 1,)
    return step.verify(target, drafter, rule, params, after, keys, draft, None, widest)
