"""Drafters that are made of others: how those are given, and how they are made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from specjax import drafters as registry
from specjax.errors import UserError
from specjax.types import LM, Drafter

Stages = Mapping[str, Mapping[str, Any] | Drafter] | Sequence[Drafter]


def check(who: str, given: Stages) -> None:
    """Raises UserError unless ``build`` would know these drafters and take their keys; ``who`` is the one that asks."""
    if not isinstance(given, Mapping | Sequence) or isinstance(given, str) or not given:
        raise UserError(f"{who} needs drafters to ask, label -> keys; give at least one")
    for label, keys in _in_order(given):
        if not isinstance(keys, Drafter):
            if not isinstance(keys, Mapping):
                raise UserError(
                    f"{who}: drafter {label} is {keys!r}; give its keys, name among them, or a Drafter"
                )
            registry.check(**_keys(label, keys))


def build(target: LM, given: Stages, *, gaps: bool) -> list[Drafter]:
    """The drafters: those of a mapping in the alphabetical order of their labels, a configuration keeps no other.

    ``gaps``: rounds may pass in which another one proposes.
    """
    stages = []
    for label, keys in _in_order(given):
        if isinstance(keys, Drafter):
            stages.append(keys)
            continue
        chosen = _keys(label, keys)
        if gaps and "gaps" in inspect.signature(registry.load(chosen["name"]).make).parameters:
            chosen["gaps"] = True
        stages.append(registry.make(chosen.pop("name"), target, **chosen))
    return stages


def _in_order(given: Stages) -> list[tuple[Any, Any]]:
    return sorted(given.items()) if isinstance(given, Mapping) else list(enumerate(given))


def _keys(label: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value, the name among them."""
    return {"name": str(label)} | {key: value for key, value in keys.items() if value is not None}
