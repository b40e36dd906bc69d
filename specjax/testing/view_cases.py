"""Cases of drafters that read a part of the target's keys and values.

The parts are small: of most texts they leave out tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specjax import drafters
from specjax.types import LM, Drafter

_MAGICDEC: dict[str, dict[str, Any]] = {
    "magicdec": {"budget": 3, "sinks": 1, "gamma": 2},
    "magicdec tree": {
        "view": "retrieval",
        "budget": 2,
        "chunk": 2,
        "refresh": 2,
        "tree": "2x1",
        "siblings": "without_replacement",
    },
    "magicdec snapkv": {
        "view": "snapkv",
        "budget": 3,
        "window": 1,
        "queries": 2,
        "pool": 1,
        "gamma": 2,
    },
}
# As ``cases._NO_MODEL``: from the target and the models.
NO_MODEL: dict[str, Callable[[LM, Any], Drafter]] = {
    name: lambda target, models, keys=keys: drafters.make("magicdec", target, **keys)
    for name, keys in _MAGICDEC.items()
}
# As ``cases._MODELS``: from the target and two draft models.
MODELS: dict[str, Callable[[LM, LM, LM], Drafter]] = {
    "triforce": lambda target, draft, other: drafters.make(
        "triforce",
        target,
        model=draft,
        gamma=2,
        budget=2,
        chunk=2,
        refresh=2,
        model_budget=2,
        sinks=1,
    ),
}
NAMES = (*NO_MODEL, *MODELS)
