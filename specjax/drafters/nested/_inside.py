"""What a drafter must be to draft for an inner model, whose text may be withdrawn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.drafters._growth import stepper
from specjax.drafters._unreadable import Unreadable
from specjax.drafters.nested import _stages
from specjax.errors import UserError
from specjax.types import Context, Drafter, ModelParams, Output


def allowed(name: str, drafter: Drafter) -> Drafter:
    """``drafter``, for drafts inside the drafter ``name``.

    Its ``init`` raises UserError if it reads the target's weights or its cache, or if its
    controller learns.

    Raises UserError for a drafter that reads the model's output, or must take part in every round.
    """
    if drafter.features or drafter.taps:
        raise UserError(
            f"{name}: {drafter.name} reads the output of the model that it drafts for, and the "
            "text of an inner model is a draft that may be withdrawn; take a lookup or a model"
        )
    if not drafter.gaps:
        raise UserError(
            f"{name}: {drafter.name} must take part in every round, and cannot return to an "
            "earlier text; take a lookup or a model"
        )
    return drafter._replace(init=Bound(_init, name, drafter))


def _init(
    name: str,
    drafter: Drafter,
    params: ModelParams,
    context: Context,
    target_out: Output,
    slots: int,
) -> Any:
    """``Drafter.init``, with the checks that need a state."""
    nothing = Unreadable(
        f"{name}: {drafter.name} reads the target's weights or its cache, and it would draft for "
        "another model; take a lookup or a model"
    )
    params, context = params._replace(target=nothing), context.replace(cache=nothing)
    state = drafter.init(params, context, target_out, slots)
    if isinstance(state, stepper.State) and jax.tree.leaves(state.control):
        raise UserError(
            f"{name}: the controller of {drafter.name} learns from verdicts, and those of inner "
            "rounds are forgotten; take one that does not learn, such as threshold:0.4"
        )
    more = slots + 1 - context.tokens.shape[1]
    longer = jnp.pad(context.tokens, ((0, 0), (0, more)), constant_values=-1)
    context = context.replace(tokens=longer)
    # Only what it reads is of interest.
    with jax.disable_jit(False):
        jax.eval_shape(
            lambda: drafter.propose(params, _stages.fake_keys(context), context, state)[0]
        )
    return state
