"""Wrong rules and drafters, each of which a test must detect.

A test kit that does not detect them proves nothing. ``tests/testing/test_mutants.py`` applies to
each mutant the test named in ``caught_by``.
"""

from __future__ import annotations

from mutants.drafters import with_draft
from mutants.entry import (
    CLAIMS,
    CONFORMANCE,
    COUNTING,
    ENUMERATION,
    FORECAST,
    LEDGER,
    PATHS,
    STATE,
    USE,
    WIDTHS,
    Mutant,
)
from mutants.published import PUBLISHED
from mutants.unseen import UNSEEN

__all__ = [
    "CLAIMS",
    "CONFORMANCE",
    "COUNTING",
    "ENUMERATION",
    "FORECAST",
    "LEDGER",
    "MUTANTS",
    "PATHS",
    "STATE",
    "USE",
    "WIDTHS",
    "Mutant",
    "named",
    "with_draft",
]

MUTANTS = (*PUBLISHED, *UNSEEN)


def named(name: str) -> Mutant:
    """The mutant of that name. Raises KeyError for an unknown name."""
    return {mutant.name: mutant for mutant in MUTANTS}[name]
