"""Drafters, one method per file; the file name is the registry: ``drafters.load("prompt_lookup").make(target)``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from specjax import registry
from specjax.types import LM, Drafter


def names() -> list[str]:
    """The methods that can be loaded."""
    return registry.names(__name__)


def load(name: str) -> ModuleType:
    """The module of that file name. Raises UserError for an unknown name."""
    return registry.load(__name__, name, "drafter")


def check(name: str, **keys: Any) -> None:
    """Raises UserError unless ``make`` would know the name and take these keys."""
    registry.check(__name__, name, "drafter", **keys)


def keys() -> dict[str, type]:
    """Every key that some drafter takes from a configuration, with its type: int, float, bool or str."""
    return registry.keys(__name__, frozenset({"params", "dtype", "gaps", "drafters"}))


def make(name: str, target: LM, **keys: Any) -> Drafter:
    """``load(name).make(target, **keys)`` with the keys checked. Raises UserError for an unknown name or key."""
    return registry.call(__name__, name, "drafter", target, **keys)
