"""Which parameters of a test run by default."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def by_default(values: Iterable, default: Collection) -> list:
    """All values as parameters of a test; those that are not in ``default`` are slow."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in default else pytest.mark.slow,
        )
        for value in values
    ]
