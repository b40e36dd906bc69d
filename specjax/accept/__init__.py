"""Acceptance rules, one file each; the file name is the registry: ``accept.load("chain")``.

``specjax.accept.verdict`` has what a new rule needs.
"""

from __future__ import annotations

from typing import Any

from specjax import registry
from specjax.accept import verdict as verdict
from specjax.errors import UserError
from specjax.types import SIBLINGS, Accept, Drafter

# Modules that are no rules.
HELPERS = ("verdict",)


def names() -> list[str]:
    """The rules that can be loaded."""
    return registry.names(__name__)


def load(name: str, **keys: Any) -> Accept:
    """The rule ``name``, made with ``keys``. Raises UserError for an unknown name or key."""
    return registry.call(__name__, name, "acceptance rule", **keys)


def check_pair(drafter: Drafter, rule: Accept) -> None:
    """Raises UserError if the class of ``rule`` does not hold for the drafts of ``drafter``.

    The message names the rules that are admissible.
    """
    if drafter.siblings not in SIBLINGS:
        raise UserError(
            f"{drafter.name} declares siblings {drafter.siblings!r}; "
            f"it must be one of {', '.join(SIBLINGS)}"
        )
    if drafter.siblings in rule.siblings:
        return
    others = [n for n in names() if drafter.siblings in load(n).siblings]
    raise UserError(
        f"the rule {rule.name} takes drafts with siblings {' or '.join(rule.siblings)}, "
        f"and {drafter.name} drafts {drafter.siblings}; rules for it are {', '.join(others)}"
    )
