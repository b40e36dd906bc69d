"""Models that read a sparse view of the target's cache, and the keys of the views."""

from __future__ import annotations

from typing import Any

from specjax import sparse_views as views
from specjax.bound import Bound
from specjax.checks import one_of, whole
from specjax.drafters._growth import Drafted
from specjax.drafters.self_speculation._own_cache import Inner
from specjax.errors import UserError
from specjax.sparse_views import View
from specjax.types import LM, Context, ModelParams, Output, Verdict

# View -> its own keys with their defaults: those of the publications, except ``refresh``, for which
# TriForce gives no number.
KEYS: dict[str, dict[str, int]] = {
    "streaming": {"sinks": 4},
    "snapkv": {"window": 32, "queries": 32, "pool": 5},
    "retrieval": {"chunk": 8, "refresh": 16},
}
LEAST = {"sinks": 0}


def make(name: str, model: LM, budget: int, most: int, **given: Any) -> View:
    """The view ``name`` of the cache of ``model``.

    ``most``: tokens that a round may add to the text. ``given`` are keys of views, None: the
    default. Raises UserError for an unknown view, a key of another view, or a wrong value.
    """
    one_of("view", name, tuple(KEYS))
    for key, value in given.items():
        if value is not None and key not in KEYS[name]:
            owner = next(view for view, own in KEYS.items() if key in own)
            raise UserError(
                f"{key} is {value} and the view is {name}; {key} belongs to the view {owner}, so "
                f"leave it out or choose {owner}"
            )
    keys = {
        key: whole(key, default if given.get(key) is None else given[key], LEAST.get(key, 1))
        for key, default in KEYS[name].items()
    }
    return getattr(views, name)(model, budget=whole("budget", budget, 1), most=most, **keys)


def inner(target: LM, view: View) -> Inner:
    """The target, with a view of its cache in the place of the cache."""
    return Inner(
        target,
        view=Bound(_read, view),
        init=Bound(_init, view),
        commit=Bound(_commit, view),
    )


def _init(view: View, params: ModelParams, context: Context, target_out: Output, slots: int) -> Any:
    """``Inner.init``. Raises UserError for a target without keys and values: a recording."""
    if not hasattr(context.cache, "k"):
        raise UserError(
            f"the view {view.name} reads the target's keys and values, and a recording has only "
            "its tokens; replay takes drafters that need no more, such as prompt_lookup"
        )
    return view.init(params.target, context)


def _read(view: View, params: ModelParams, context: Context, kept: Any) -> tuple[Any, Any]:
    return view.read(params.target, context, kept)


def _commit(
    view: View,
    params: ModelParams,
    kept: Any,
    drafted: Drafted | None,
    verdict: Verdict,
    target_out: Output,
) -> Any:
    return view.commit(kept, verdict.count > 0)
