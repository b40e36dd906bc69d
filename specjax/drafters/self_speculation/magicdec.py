"""MagicDec: the target itself drafts, with a part of its cache of constant size. L1 ("chain").

Chen et al. 2024 (2408.11049). All weights are read for a draft token, but of the cache only
``budget`` tokens: with long texts and many rows most of the target's time is spent on its cache, so
drafts are cheap and, made by the same weights, often accepted. With short texts a draft token costs
as much as one of the target's own (``theory.roofline.critical_context``).
"""

from __future__ import annotations

from typing import Any

from specjax import declare
from specjax import sparse_views as views
from specjax.bound import Bound
from specjax.checks import one_of, whole
from specjax.declare import key
from specjax.drafters import growth
from specjax.drafters.growth import Drafted
from specjax.drafters.growth.plans import Method
from specjax.drafters.self_speculation import _own_cache
from specjax.drafters.self_speculation._own_cache import Inner
from specjax.drafters.shared_keys import TreeKeys
from specjax.errors import UserError
from specjax.sparse_views import View
from specjax.topology import shapes
from specjax.types import LM, Context, Drafter, ModelParams, Output, Verdict

REFERENCE = ("chen2025magicdec", "xiao2024efficient", "li2024snapkv")

GAMMA = 4


class Keys(TreeKeys):
    """The keys of ``magicdec``."""

    view: str = key(
        "streaming",
        '"streaming" (the first and the most recent tokens), "snapkv" (those that the end of the '
        'prompt attends to, and the most recent ones), or "retrieval" (chunks that fit the newest'
        " query, chosen again every ``refresh`` rounds)",
    )
    budget: int = key(
        512, 'tokens of the view in each layer; "retrieval" has further slots for new tokens'
    )
    sinks: int | None = key(None, 'of "streaming": the first tokens, of the budget; None: 4')
    window: int | None = key(None, 'of "snapkv": the most recent tokens, of the budget; None: 32')
    queries: int | None = key(
        None, 'of "snapkv": the last tokens of the prompt that choose; None: 32'
    )
    pool: int | None = key(
        None, 'of "snapkv": neighbours over which attention is averaged, odd; None: 5'
    )
    chunk: int | None = key(None, 'of "retrieval": tokens of a chunk; None: 8')
    refresh: int | None = key(
        None,
        'of "retrieval": rounds after which the chunks are chosen again, at the cost of a token '
        "of the target; None: 16",
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with the target and a sparse view of its cache.

    Raises:
        UserError: an unknown view, a key of another view, a budget that is too small for it, a
            target whose cache has no keys and values to choose from, a shape that does not fit.
    """
    plan = growth.read(Method("magicdec", shapes.chain(GAMMA), "iid", target.vocab_size), keys)
    own = {setting: getattr(keys, setting) for view in VIEWS.values() for setting in view}
    chosen = view_of(keys.view, target, keys.budget, plan.growth.depth + 1, **own)
    drafter = _own_cache.build("magicdec", with_view(target, chosen), plan)
    return drafter._replace(history=drafter.history or chosen.history)


# Models that read a sparse view of the target's cache, and the keys of the views.

# View -> its own keys with their defaults: those of the publications, except ``refresh``, for which
# TriForce gives no number.
VIEWS: dict[str, dict[str, int]] = {
    "streaming": {"sinks": 4},
    "snapkv": {"window": 32, "queries": 32, "pool": 5},
    "retrieval": {"chunk": 8, "refresh": 16},
}


def view_of(name: str, model: LM, budget: int, most: int, **given: Any) -> View:
    """The view ``name`` of the cache of ``model``.

    ``most``: tokens that a round may add to the text. ``given`` are keys of views, None: the
    default. Raises UserError for an unknown view, a key of another view, or a wrong value.
    """
    one_of("view", name, tuple(VIEWS))
    given = {setting: value for setting, value in given.items() if value is not None}
    for setting, value in given.items():
        if setting not in VIEWS[name]:
            owner = next(view for view, own in VIEWS.items() if setting in own)
            raise UserError(
                f"{setting} is {value} and the view is {name}; {setting} belongs to the view "
                f"{owner}, so leave it out or choose {owner}"
            )
    keys = VIEWS[name] | given
    for setting, value in keys.items():
        whole(setting, value, 0 if setting == "sinks" else 1)
    return getattr(views, name)(model, budget=whole("budget", budget, 1), most=most, **keys)


def with_view(target: LM, view: View) -> Inner:
    """The target, with a view of its cache in the place of the cache."""
    read, init, commit = (Bound(part, view) for part in (_read, _init, _commit))
    return Inner(target, view=read, init=init, commit=commit)


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
    view: View, params: ModelParams, kept: Any, drafted: Drafted | None, verdict: Verdict, *_: Any
) -> Any:
    return view.commit(kept, verdict.count > 0)
