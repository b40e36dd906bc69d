"""Acceptance rules, one file each; the file name is the registry: ``accept.load("chain")``.

``specjax.accept.verdict`` has what a new rule needs. ``load`` also takes the name of a rule outside
the package, "my_module:make".
"""

from __future__ import annotations

from typing import Any

from specjax import registry
from specjax.accept import verdict as verdict
from specjax.errors import UserError
from specjax.types import CHAIN, CLASSES, COUPLED, DETERMINISTIC, SIBLINGS, Accept, Drafter

# Modules that are no rules.
HELPERS = ("verdict",)
# Siblings -> the recommended rule; "recursive" for the others.
_DEFAULT = {CHAIN: "chain", DETERMINISTIC: "deterministic", COUPLED: "coupled"}


def names() -> list[str]:
    """The rules that can be loaded."""
    return registry.names(__name__)


def keys() -> dict[str, type]:
    """Every key that a rule takes from a configuration: key -> int or float."""
    return registry.keys(__name__)


def load(name: str, **keys: Any) -> Accept:
    """The rule ``name``, made with ``keys``.

    Raises UserError for an unknown name or key, or a function that makes no rule of a known class.
    """
    rule = registry.call(__name__, name, "acceptance rule", Accept, **keys)
    check(rule)
    return rule


def check(rule: Accept) -> None:
    """Raises UserError unless a rule declares a lossless class and kinds of siblings that exist."""
    if rule.lossless_class not in CLASSES:
        raise UserError(
            f"the rule {rule.name} declares the lossless class {rule.lossless_class!r}; "
            f"it must be one of {', '.join(CLASSES)}"
        )
    kinds = rule.siblings
    if not isinstance(kinds, tuple | list) or not kinds or not set(kinds) <= set(SIBLINGS):
        raise UserError(
            f"the rule {rule.name} declares siblings {kinds!r}; "
            f"it must be a tuple of some of {', '.join(SIBLINGS)}"
        )


def default_rule(drafter: Drafter) -> str:
    """The name of the recommended rule, by the siblings of the drafts; its class is L1.

    "match" without drafts: the text of ``decode.autoregressive``. "chain" for chains,
    "deterministic" for deterministic trees, "coupled" for coupled drafts, "recursive" for other
    sampled siblings.
    Raises UserError for siblings that are none of ``types.SIBLINGS``.
    """
    _check_siblings(drafter)
    return _DEFAULT.get(drafter.siblings, "recursive") if drafter.nodes else "match"


def _check_siblings(drafter: Drafter) -> None:
    if drafter.siblings not in SIBLINGS:
        raise UserError(
            f"{drafter.name} declares siblings {drafter.siblings!r}; "
            f"it must be one of {', '.join(SIBLINGS)}"
        )


def check_pair(drafter: Drafter, rule: Accept) -> None:
    """Raises UserError if the class of ``rule`` does not hold for the drafts of ``drafter``.

    The message names the rules that are admissible. A class that does not exist is an error too.
    """
    check(rule)
    _check_siblings(drafter)
    if drafter.siblings in rule.siblings:
        return
    others = [n for n in names() if drafter.siblings in load(n).siblings]
    raise UserError(
        f"the rule {rule.name} takes drafts with siblings {' or '.join(rule.siblings)}, "
        f"and {drafter.name} drafts {drafter.siblings}; rules for it are {', '.join(others)}"
    )
