"""The numbers of rows that the parts of a drafter are made for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from specjax.bound import Bound
from specjax.control import Controller
from specjax.types import Drafter


def check_rows(parts: Iterable[Drafter | Controller | None]) -> Callable[[int], None] | None:
    """``Drafter.check_rows`` of a drafter with these parts; None where all take any number."""
    checks = tuple(part.check_rows for part in parts if part is not None and part.check_rows)
    return Bound(_all, checks) if checks else None


def _all(checks: Iterable[Callable[[int], Any]], rows: int) -> None:
    for check in checks:
        check(rows)
