"""A controller for drafters that propose their drafts whole: lookups and the like.

It knows the longest draft before the round, and the draft is cut to so many levels. Such a limit
does not depend on the tokens that are cut off, so the output law does not change. If the draft is a
function of the committed text (it has no probabilities), the limit may also depend on how many
levels each row's draft has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import struct

from specjax import control, tree
from specjax.bound import Bound
from specjax.control import Controller, _counts
from specjax.drafters import _batches, _growth
from specjax.drafters._growth.rows import where_rows
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.types import Context, Draft, Drafter, ModelParams, Output, Params, Rest, Verdict


class State(struct.PyTreeNode):
    """What is carried from round to round."""

    own: Any  # the drafter's
    control: Any  # the controller's


class _Setup(NamedTuple):
    """The static settings."""

    drafter: Drafter
    controller: Controller


def limited(drafter: Drafter, text: str | Controller) -> Drafter:
    """The drafter with the controller that ``control.parse`` reads; "" is the drafter itself.

    Raises UserError for a controller that needs the probabilities of a draft as it grows.
    """
    controller = control.parse(text)
    if controller is None:
        return drafter
    if controller.limit is None or controller.ask is not None:
        raise UserError(
            f"control is {controller.name!r}, which reads the probabilities of a draft as it "
            f"grows, and {drafter.name} has none; take one of {', '.join(control.limiting())}"
        )
    setup, learn = _Setup(drafter, controller), None
    lasting = None
    if drafter.gaps and not drafter.features and controller.pause is not None:
        lasting = _growth.pausing(controller.pause)
    if drafter.learn is not None:
        learn = Bound(_learn, setup)
    return drafter._replace(
        init=Bound(_init, setup),
        propose=Bound(_propose, setup),
        update=Bound(_update, setup),
        learn=learn,
        whole=False,
        constant_cost=False,
        adaptive=True,
        check_rows=_batches.check_rows([drafter, controller]),
        history=drafter.history or controller.has_state,
        rest=Rest(Bound(_rests, setup), Bound(_idle, setup), lasting),
    )


def _rests(setup: _Setup, state: State) -> jax.Array:
    most = control.longest(setup.controller, state.control)
    assert most is not None
    return most == 0


def _idle(
    setup: _Setup, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> State:
    # The draft is not read, so it is not computed.
    return state.replace(own=setup.drafter.propose(params, keys, context, state.own)[1])


def _learn(setup: _Setup, params: ModelParams, state: Any, lengths: Sequence[int]) -> Params:
    assert setup.drafter.learn is not None
    return setup.drafter.learn(params, state.replace(draft=state.draft.own), lengths)


def _init(
    setup: _Setup, params: ModelParams, context: Context, target_out: Output, slots: int
) -> State:
    own = setup.drafter.init(params, context, target_out, slots)
    return State(own, setup.controller.init(context))


def _propose(
    setup: _Setup, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> tuple[Draft, State]:
    draft, own = setup.drafter.propose(params, keys, context, state.own)
    # Of a drawn draft, the number of levels may depend on the tokens that were drawn.
    reach = None if draft.probs is not None else _counts.drafted(draft)
    most = control.longest(setup.controller, state.control, reach)
    assert most is not None
    depth = tree.depths(draft.parents, *draft.tokens.shape)
    cut = draft.replace(valid=draft.valid & (depth < most[:, None]))
    return cut, state.replace(own=own)


def _update(
    setup: _Setup,
    params: ModelParams,
    state: State,
    draft: Draft,
    verdict: Verdict,
    target_out: Output,
) -> State:
    own = setup.drafter.update(params, state.own, draft, verdict, target_out)
    new = setup.controller.update(state.control, draft, verdict)
    if not setup.controller.shared:
        new = where_rows(verdict.count > 0, new, state.control)
    return State(own, new)
