"""What these drafters share: a stepper whose model reads the target's cache.

The committed text is in the target's cache already, so the drafter stores nothing of it: a round
begins by feeding the pending token, and the draft's own keys and values are dropped at its end, or
at the end of the verification that goes on from them (``Inner.lower``). A method states which model
reads the cache (``Inner.model``), and which part of it (``Inner.view``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from specjax.bound import Bound
from specjax.drafters import growth
from specjax.drafters.growth import Begun, Plan, State, Stepper
from specjax.errors import UserError
from specjax.models import overlay
from specjax.prompt import check_window
from specjax.types import (
    LM,
    Context,
    Drafter,
    LowerLayers,
    ModelParams,
    Params,
    no_params,
    no_state,
    same_state,
)


def _whole(params: ModelParams, context: Context, kept: Any) -> tuple[Any, Any]:
    """``Inner.view`` of a model that reads the whole cache."""
    return context.cache, kept


class Inner(NamedTuple):
    """A model that reads the target's cache."""

    model: LM  # ``Inside.part`` of the target, or another model with the same cache
    # (ModelParams) -> the model's parameters
    params: Callable[[ModelParams], Params] = operator.attrgetter("target")
    # (params, context, kept) -> (the cache that the model reads, kept): at the begin of a round.
    view: Callable[..., tuple[Any, Any]] = _whole
    # What the view keeps between rounds: as ``Stepper.init`` and ``Stepper.commit``.
    init: Callable[..., Any] = no_state
    commit: Callable[..., Any] = same_state
    # Whether ``commit`` reads the target's output.
    features: bool = False
    # (State) -> what the target's pass goes on from, ``Rare.lower``; None: nothing.
    lower: Callable[[State], LowerLayers] | None = None


def build(
    name: str, inner: Inner, plan: Plan, init_params: Callable[..., Any] = no_params, **more: Any
) -> Drafter:
    """The drafter ``name``, which grows its drafts with this model.

    The other arguments are those of ``growth.build``; ``gaps`` is True without it. L1 with a rule
    that takes its siblings.

    Raises UserError for drafts longer than a sliding window of the model.
    """
    stepper = Stepper(
        begin=Bound(_begin, name, inner),
        step=Bound(growth.step_of_model, inner.model, inner.params),
        init=inner.init,
        commit=inner.commit,
        looped=True,
        lends_block=inner.lower is not None,
    )
    more = {"features": inner.features, "gaps": True} | more
    drafter = growth.build(name, stepper, plan, init_params, **more)
    check_window(inner.model, drafter)
    return drafter._replace(rare=drafter.rare._replace(lower=inner.lower))


def check_cache(name: str, cache: Any) -> None:
    """Raises UserError for the cache of a model that drafts inside another drafter."""
    if overlay.is_overlay(cache):
        raise UserError(
            f"{name} reads the cache of the target that it was made for, and inside another "
            "drafter it would draft for another model; take a lookup or a draft model there"
        )


def _begin(name: str, inner: Inner, params: ModelParams, context: Context, kept: Any) -> Begun:
    """``Stepper.begin``: the pending token has the first place of the block."""
    check_cache(name, context.cache)
    cache, kept = inner.view(params, context, kept)
    out, own = inner.model.apply(inner.params(params), context.pending[:, None], cache)
    return Begun(out.logits[:, 0], kept, own, reads=cache)
