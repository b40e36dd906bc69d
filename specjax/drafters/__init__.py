"""Drafters, one method per file; the file name is the registry: ``drafters.load("medusa")``.

Each function also takes the name of a drafter outside the package, "my_module:make".
"""

from __future__ import annotations

from typing import Any

from specjax import registry
from specjax.types import LM, Drafter

# What methods share, and a command that finds keys for one; not methods.
HELPERS = ("files", "growth", "objectives", "pairs", "shared_keys", "skip_search", "spire_model")
# The drafters of a target alone, and of a target with a draft model, if none is named.
PLAIN, WITH_MODEL = "none", "draft_model"


def names() -> list[str]:
    """The methods that can be loaded."""
    return registry.names(__name__)


def families() -> dict[str, list[str]]:
    """Family -> its methods: "lookup", "heads", ...; "" for those of no family."""
    result: dict[str, list[str]] = {}
    for name in names():
        result.setdefault(registry.family(__name__, name), []).append(name)
    return dict(sorted(result.items()))


def load(name: str) -> Any:
    """The module of that file name. Raises UserError for an unknown name."""
    return registry.load(__name__, name, "drafter")


def released(target: str) -> dict[str, str]:
    """Drafter -> the name on the Hub of a head that was trained for the target of this name."""
    heads = {name: getattr(load(name), "RELEASED", {}).get(target) for name in names()}
    return {name: head for name, head in heads.items() if head}


def check(name: str, **keys: Any) -> None:
    """Raises UserError unless the name exists and its ``make`` takes these keys."""
    registry.check(__name__, name, "drafter", **keys)


def keys() -> dict[str, type]:
    """Every key that a drafter takes from a configuration: key -> int, float, bool or str."""
    return {key: kind for key, kind in registry.keys(__name__).items() if key != "drafters"}


def make(name: str, target: LM, **keys: Any) -> Drafter:
    """``load(name).make(target, **keys)`` with checked keys.

    Raises UserError for an unknown name or key, or a function that makes no drafter.
    """
    return registry.call(__name__, name, "drafter", Drafter, target, **keys)
