"""Cases of drafters that contain other drafters, or a draft model with a rule of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specjax import drafters
from specjax.types import LM, Drafter


def _escalate(target: LM, models: Any) -> Drafter:
    lookup = drafters.make("prompt_lookup", target, gamma=3, max_ngram=2, min_ngram=2)
    own = {"model": models.draft, "params": models.params[1]}
    model = drafters.make("draft_model", target, gamma=2, gaps=True, **own)
    return drafters.make("escalate", target, drafters=[lookup, model])


def _controlled(target: LM, models: Any) -> Drafter:
    own = {"model": models.draft, "params": models.params[1]}
    keys = {"tree": "2x1", "siblings": "top_k", **own}
    return drafters.make(
        "controlled", target, drafters=[drafters.make("draft_tree", target, **keys)], rate=0.6
    )


def _cascade(**keys: Any) -> Callable[[LM, Any], Drafter]:
    def make(target: LM, models: Any) -> Drafter:
        inner = [models.draft, models.other]
        return drafters.make("cascade", target, models=inner, params=models.params[1:], **keys)

    return make


def _staged(target: LM, models: Any) -> Drafter:
    lookup = drafters.make("prompt_lookup", target, gamma=2, max_ngram=2)
    own = {"model": models.draft, "params": models.params[1]}
    return drafters.make("staged", target, drafters=[lookup], gamma=2, **own)


def _bild(target: LM, models: Any) -> Drafter:
    own = {"model": models.draft, "params": models.params[1]}
    return drafters.make("bild", target, gamma=2, fallback=0.5, **own)


# As ``cases._NO_MODEL``: from the target and the models.
NO_MODEL: dict[str, Callable[[LM, Any], Drafter]] = {
    "escalate": _escalate,
    "controlled": _controlled,
    # Three levels: the second model and the lookup draft for the first one.
    "cascade": _cascade(lengths="2,0,0;1,0;1"),
    # A part of each model, then one of the lookup.
    "cascade in parts": _cascade(lengths="1,1,1;0,1;1"),
    "staged": _staged,
    "bild": _bild,
}
