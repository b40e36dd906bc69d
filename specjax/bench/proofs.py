"""Whether the lossless class of a method is proven, or only declared by its author.

The tests of specjax prove the class of the package's own rules and drafters. Objects from elsewhere
declare a class. It counts as proven when a report of ``testing.check_drafter`` (of a drafter) or
``testing.check_accept`` (of a rule) is given that passed all checks, of an object of that name, in
this version of specjax. A quick report proves nothing, and neither does one of a drafter without a
rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specjax import __version__, files
from specjax.errors import UserError
from specjax.types import LM, Accept, Drafter

PROVEN, DECLARED = "proven", "declared"
SCHEMA = 1
# Tools for tests, with wrong methods among them: not proven.
UNPROVEN = "specjax.testing"
LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "functools", "builtins", "optax", "operator")


class Report(Protocol):
    """A report of ``testing.check_drafter`` or ``testing.check_accept``."""

    @property
    def name(self) -> str: ...

    @property
    def findings(self) -> Sequence[Any]: ...  # (check, passed, detail)

    @property
    def passed(self) -> bool: ...

    @property
    def proves(self) -> str: ...  # "drafter", "rule", or "" for an incomplete report


class Proof(NamedTuple):
    """What a report says about one object."""

    name: str  # of the drafter or the rule
    version: str  # of specjax, in which the checks were made
    passed: bool
    proves: str  # "drafter", "rule", or "" for an incomplete report


def of_report(report: Report) -> Proof:
    """The proof that a report made in this process is."""
    passed = bool(report.passed and report.findings)
    return Proof(report.name, __version__, passed, report.proves)


def write(report: Report, path: Path) -> None:
    """Writes a report as a file for ``config.proof``. Raises UserError."""
    proof = of_report(report)
    findings = [[f.check, f.passed, f.detail] for f in report.findings]
    try:
        files.write_json(path, {"schema": SCHEMA, **proof._asdict(), "findings": findings})
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file") from None


def read(path: str | Path) -> Proof:
    """The proof in a file that ``write`` made. Raises UserError if it is none."""
    path = Path(path).expanduser()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["schema"] != SCHEMA:
            raise ValueError
        proof = Proof(value["name"], value["version"], value["passed"], value["proves"])
        results = [finding[1] for finding in value["findings"]]
    except OSError as error:
        raise UserError(
            f"the proof {path} cannot be read ({error.strerror}); "
            "give a file that specjax.bench.proofs.write made"
        ) from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise UserError(
            f"{path} is no proof; give a file that specjax.bench.proofs.write made"
        ) from None
    passed = proof.passed is True and bool(results) and all(each is True for each in results)
    return proof._replace(passed=passed)


def status(
    drafter: Drafter, rule: Accept, target: LM | None = None, proofs: Iterable[Proof] = ()
) -> str | None:
    """The status of a method's lossless class: "proven" or "declared"; None for class L3.

    ``target`` is the model that the drafter was made for.
    """
    if rule.lossless_class == "L3":
        return None
    known = {(p.proves, p.name) for p in proofs if p.passed and p.version == __version__}
    parts = (("drafter", drafter), ("rule", rule))
    good = (of_package(each, target) or (kind, each.name) in known for kind, each in parts)
    return PROVEN if all(good) else DECLARED


def unused(proofs: Iterable[Proof], names: Iterable[str]) -> list[str]:
    """One line for each proof that proves nothing here.

    ``names``: of the drafters and rules that are measured.
    """
    measured, lines = set(names), []
    for proof in proofs:
        if proof.version != __version__:
            why = f"it was made with specjax {proof.version}, and this is {__version__}"
        elif not proof.passed:
            why = "not all of its checks passed"
        elif not proof.proves:
            why = "it is the report of quick checks, or of a drafter without a rule"
        elif proof.name not in measured:
            why = "no drafter and no rule has this name"
        else:
            continue
        lines.append(f"the proof of {proof.name} is not used: {why}")
    return lines


def of_package(method: Drafter | Accept, target: LM | None = None) -> bool:
    """Whether every function of a method is defined in specjax, ``specjax.testing`` excluded.

    Functions inside others (closures, partial arguments, bound objects) count. Language models do
    not, nor do the functions of ``target``: a method is lossless with every model.
    """
    # The values themselves are kept, so that no id is used again.
    seen: dict[int, Any] = {id(function): function for function in target or ()}
    waiting: list[Any] = [method]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, LM):
            continue
        seen[id(value)] = value
        if callable(value) and not _from_package(value):
            return False
        waiting += _parts(value)
    return True


def _from_package(function: Any) -> bool:
    module = getattr(function, "__module__", None) or type(function).__module__
    if module == UNPROVEN or module.startswith(UNPROVEN + "."):
        return False
    return module.partition(".")[0] in ("specjax", *LIBRARIES)


def _parts(value: Any) -> list[Any]:
    """What a value holds that may have functions in it."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, tuple | list | set | frozenset):
        return list(value)
    parts = [getattr(value, name, None) for name in ("__wrapped__", "func", "args", "keywords")]
    parts += [getattr(value, name, None) for name in ("__self__", "__defaults__", "__kwdefaults__")]
    for cell in getattr(value, "__closure__", None) or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not set yet: a function that names itself
            continue
    own = getattr(value, "__dict__", None)
    kind = type(value).__module__.partition(".")[0]
    if isinstance(own, dict) and not isinstance(value, type) and kind not in LIBRARIES:
        parts += own.values()
    return [part for part in parts if part is not None and not isinstance(part, str | int | float)]
