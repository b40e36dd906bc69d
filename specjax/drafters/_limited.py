"""A controller for drafters that propose their drafts whole: lookups and the like.

It knows the longest draft before the round, and the draft is cut to so many levels. Such a limit
does not depend on the tokens that are cut off, so the output law does not change. If the draft is a
function of the committed text (it has no probabilities), the limit may also depend on how many
levels each row's draft has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flax import struct

from specjax import control, tree
from specjax.bound import Bound
from specjax.control import Controller, _controller
from specjax.drafters import growth
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.types import (
    CheckRows,
    Context,
    Draft,
    Drafter,
    Learn,
    ModelParams,
    Output,
    Params,
    Rare,
    Verdict,
)

Both = tuple[Drafter, Controller]


class State(struct.PyTreeNode):
    """What is carried from round to round."""

    own: Any  # the drafter's
    control: Any  # the controller's


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
    control.check_tree(controller, drafter.name, drafter.siblings, drafter.nodes)
    both, lasting = (drafter, controller), drafter.gaps and not drafter.features
    return drafter._replace(
        init=Bound(_init, both),
        propose=Bound(_propose, both),
        update=Bound(_update, both),
        whole=False,
        constant_cost=False,
        adaptive=True,
        history=drafter.history or controller.has_state,
        rare=drafter.rare._replace(
            learn=drafter.rare.learn and Bound(_learn, drafter.rare.learn),
            rest=growth.rest(controller, Bound(_idle, drafter), lasting),
            check_rows=check_rows([drafter.rare, controller]),
            lengths=_lengths(drafter, controller),
            sizes=controller.sizes(drafter.nodes),
            verdicts=controller.has_state,
        ),
    )


def _lengths(drafter: Drafter, controller: Controller) -> tuple[int, ...]:
    """``Rare.lengths``: the controller's, and two between for drafts that may be shorter."""
    whole = drafter.whole or not controller.lengths
    most = min(drafter.nodes, max(controller.lengths, default=0))
    between = () if whole else tree.lengths_between(most)
    return (*controller.lengths, *between)


def _idle(
    drafter: Drafter, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> State:
    # The draft is not read, so it is not computed.
    return state.replace(own=drafter.propose(params, keys, context, state.own)[1])


def _learn(learn: Learn, params: ModelParams, state: Any, lengths: Sequence[int]) -> Params:
    return learn(params, state.replace(draft=state.draft.own), lengths)


def _init(both: Both, *args: Any) -> State:
    """``args``: params, context, target_out and slots."""
    drafter, controller = both
    return State(drafter.init(*args), controller.init(args[1]))


def _propose(
    both: Both, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> tuple[Draft, State]:
    drafter, controller = both
    draft, own = drafter.propose(params, keys, context, state.own)
    # Of a drawn draft, the number of levels may depend on the tokens that were drawn.
    reach = None if draft.probs is not None else _controller.drafted(draft)
    most = control.longest(controller, state.control, reach)
    assert most is not None
    depth = tree.depths(draft.parents, *draft.tokens.shape)
    cut = draft.replace(valid=draft.valid & (depth < most[:, None]))
    if controller.size is None:
        return cut, state.replace(own=own)
    cut, _, chosen = control.sized(controller, state.control, cut, None)
    return cut, State(own, chosen)


def _update(
    both: Both, params: ModelParams, state: State, draft: Draft, verdict: Verdict, out: Output
) -> State:
    drafter, controller = both
    own = drafter.update(params, state.own, draft, verdict, out)
    return State(own, growth.updated(controller, state.control, draft, verdict))


# The numbers of rows that the parts of a drafter are made for.


def check_rows(parts: Iterable[Rare | Controller]) -> CheckRows | None:
    """``Rare.check_rows`` of a drafter with these parts; None where all take any number."""
    checks = tuple(part.check_rows for part in parts if part.check_rows)
    return Bound(_all, checks) if checks else None


def _all(checks: Iterable[Callable[[int], Any]], rows: int) -> None:
    for check in checks:
        check(rows)
