"""An entry of the registry of mutants, and what detects it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from mutants.drafters import with_draft
from specjax.accept import verdict as _verdict
from specjax.types import SIBLINGS, Accept, Drafter

ENUMERATION, LEDGER, COUNTING, CONFORMANCE = "enumeration", "ledger", "counting", "conformance"
PATHS, CLAIMS, STATE, FORECAST = "paths", "claims", "state", "forecast"
WIDTHS, USE = "widths", "use"


class Mutant(NamedTuple):
    """One mistake: a wrong rule, or a correct rule and a change of a correct drafter."""

    name: str
    mistake: str
    source: str  # the code or paper where it was made, or that is misread
    case: str  # a name for ``cases.named``, on which the mistake changes the output
    rule: Callable[[], Accept]
    change: Callable[[Drafter], Drafter] = lambda drafter: drafter
    caught_by: str = ENUMERATION
    settings: dict = {}  # noqa: RUF012


def rule_mutant(
    sampled: Callable, case: str, mistake: str, source: str, caught_by=ENUMERATION, **settings: Any
) -> Mutant:
    """A wrong rule; ``settings`` of ``sampling.make_sampling`` with which it is tested."""
    name = sampled.__name__

    def make() -> Accept:
        return Accept(sampled, _verdict.greedy, name, "L3", SIBLINGS)

    return Mutant(name, mistake, source, case, make, caught_by=caught_by, settings=settings)


def drafter_mutant(
    change: Callable,
    case: str,
    rule: Callable[[], Accept],
    mistake: str,
    source: str,
    caught_by=ENUMERATION,
    **settings: Any,
) -> Mutant:
    """A wrong drafter with a correct rule; ``change`` is one of drafts, or of drafters.

    A change of drafters has one argument.
    """
    of_drafts = len(inspect.signature(change).parameters) == 3
    changed = with_draft(change) if of_drafts else change
    return Mutant(change.__name__, mistake, source, case, rule, changed, caught_by, settings)
