"""Acceptance rules, one file each; the file name is the registry: ``accept.load("chain")``."""

from __future__ import annotations

from typing import Any

from specjax import registry
from specjax.types import Accept


def names() -> list[str]:
    """The rules that can be loaded."""
    return registry.names(__name__)


def load(name: str, **keys: Any) -> Accept:
    """The rule of that file name, made with ``keys``. Raises UserError for an unknown name or key."""
    return registry.call(__name__, name, "acceptance rule", **keys)
