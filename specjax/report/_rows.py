"""Reads values from the rows of results.json, which are not checked, for plots and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# An efficiency above this was not measured well: the parts of a round took less time in the loop
# than alone. Somewhat more than 1 is possible, see ``columns``.
MOST_EFFICIENT = 1.2
# Rows that agree in these keys are one measurement, as a whole and by category.
SAME = ("method", "accept", "temperature", "batch_size", "prompt_set", "warm")
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


def owners(rows: Sequence[dict]) -> list[dict | None]:
    """For each row of a category the row over all prompts that it is a part of.

    That is a row with the same settings: if several lengths of prompts were measured, the one with
    its own mean length, else the last one before it. None if there is none, and for other rows.
    """
    whole: dict[str, list[tuple[int, dict]]] = {}
    for index, row in enumerate(rows):
        if row.get("category") is None:
            whole.setdefault(_settings(row), []).append((index, row))
    result: list[dict | None] = []
    for index, row in enumerate(rows):
        known = whole.get(_settings(row), []) if row.get("category") is not None else []
        alike = [each for each in known if each[1].get("context") == row.get("context")]
        choice = alike or known
        before = [each for at, each in choice if at < index]
        result.append(before[-1] if before else choice[0][1] if choice else None)
    return result


def _settings(row: dict) -> str:
    return repr([row.get(key) for key in SAME])


def lossless_class(row: dict) -> str:
    """The class of a row's rule, and whether it is proven: "L1 proven"; "" if it has none."""
    status = row.get("class_status")
    shown = f" {status}" if status in ("proven", "declared") else ""
    return f"{row.get('class') or ''}{shown}" if row.get("class") else ""


def too_efficient(row: dict) -> bool:
    """Whether the system efficiency is so far above 1 that it was not measured."""
    value = number(row, "system_efficiency")
    return value is not None and value > MOST_EFFICIENT
