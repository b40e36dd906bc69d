"""Reads values from the rows of results.json, which are not checked, for plots and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

RANGE = 1e15  # no measurement is larger, and matplotlib cannot lay out an axis that is much longer
TIME_PARTS = ("draft", "verify", "accept", "host")  # the parts of the decoding time, in order


def is_number(value: Any) -> bool:
    """Whether it is a number that can be drawn: 0, or between 1 / ``RANGE`` and ``RANGE``."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value == 0 or 1 / RANGE <= abs(value) <= RANGE


def number(row: dict, name: str) -> Any:
    """The value under ``name`` if it is a number that can be drawn, else None."""
    value = row.get(name)
    return value if is_number(value) else None


def part(row: dict, name: str) -> dict:
    """The value under ``name`` if it is an object, else {}."""
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def parameters(row: dict, name: str) -> Any:
    """The number of parameters of "target" or "draft"; None if it is not known."""
    return number(part(row, "parameters"), name)


def label(row: dict) -> str:
    """The user's label of the row's method."""
    return str(row.get("method") or row.get("drafter") or "unnamed")


def finished(rows: Sequence[dict]) -> list[dict]:
    """The rows over all prompts that have a speed-up."""
    return [
        row for row in rows if (number(row, "speedup") or 0) > 0 and row.get("category") is None
    ]


def by_label(rows: Sequence[dict]) -> dict[str, list[dict]]:
    """The rows of each method, in the order of their first rows."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(label(row), []).append(row)
    return groups
