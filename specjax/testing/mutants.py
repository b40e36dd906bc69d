"""Wrong rules and drafters, each of which a test must detect.

A test kit that does not detect them proves nothing. ``tests/testing/test_mutants.py`` applies to
each mutant the test named in ``caught_by``.
"""

from __future__ import annotations

from specjax.testing.mutant_drafters import with_draft
from specjax.testing.mutant_entry import (
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
from specjax.testing.mutants_published import PUBLISHED
from specjax.testing.mutants_unseen import UNSEEN

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
