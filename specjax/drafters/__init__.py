"""Drafters, one method per file; the file name is the registry: ``drafters.load("medusa")``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from specjax import registry
from specjax.types import LM, Drafter

# Keys that only Python code can give: they have no form on a command line.
_PYTHON_ONLY = frozenset({"params", "dtype", "gaps", "drafters"})


def names() -> list[str]:
    """The methods that can be loaded."""
    return registry.names(__name__)


def load(name: str) -> ModuleType:
    """The module of that file name. Raises UserError for an unknown name."""
    return registry.load(__name__, name, "drafter")


def check(name: str, **keys: Any) -> None:
    """Raises UserError unless the name exists and its ``make`` takes these keys."""
    registry.check(__name__, name, "drafter", **keys)


def keys() -> dict[str, type]:
    """Every key that a drafter takes from a configuration: key -> int, float, bool or str."""
    return registry.keys(__name__, _PYTHON_ONLY)


def make(name: str, target: LM, **keys: Any) -> Drafter:
    """``load(name).make(target, **keys)`` with checked keys.

    Raises UserError for an unknown name or key.
    """
    return registry.call(__name__, name, "drafter", target, **keys)
