"""Numbers and switches of a config.json, checked."""

from __future__ import annotations

import math
from typing import Any

from specjax.errors import UserError


def value_of(raw: dict, key: str, kind: type = int, default: Any = None) -> Any:
    """A finite number above 0, or a boolean if ``kind`` is bool; null means ``default``.

    Raises UserError for another value, and where there is neither a value nor a default.
    """
    value = default if raw.get(key) is None else raw[key]
    valid = isinstance(value, (int, kind)) and isinstance(value, bool) == (kind is bool)
    if not valid or (kind is not bool and not (value > 0 and math.isfinite(value))):
        expected = f"a positive {'integer' if kind is int else 'number'}"
        raise UserError(
            f"{key} is {'missing' if value is None else repr(value)}; "
            f"it must be {'true or false' if kind is bool else expected}"
        )
    return value


def object_of(raw: dict, key: str) -> dict:
    """The object under ``key``; empty if it is missing or null. Raises UserError otherwise."""
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{key} is {value!r}; it must be an object or null")
    return value or {}
