"""Whether the lossless class of a method is proven, or only declared by its author.

The tests of specjax prove the class of the package's own rules and drafters. Objects from elsewhere
declare a class. It counts as proven when a report of ``testing.check_drafter`` (of a drafter) or
``testing.check_accept`` (of a rule) is given that passed all checks, of an object of that name, in
this version of specjax. For a rule, class and keys must be equal too (``keys_of``): the report of
one rule does not count for another of the same name. A quick report proves nothing, and neither
does one of a drafter without a rule.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from specjax import __version__, files
from specjax.data import jsonl
from specjax.errors import UserError, on_disk
from specjax.files import buckets
from specjax.types import LM, Accept, Drafter

PROVEN, DECLARED = "proven", "declared"
SCHEMA = 2
# Tools for tests, with wrong methods among them: not proven.
UNPROVEN = "specjax.testing"
LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "functools", "builtins", "optax", "operator")


PLAIN = (str, int, float, type(None))  # hold nothing


class Finding(NamedTuple):
    """The result of one check.

    ``passed`` None: not proven. Nothing failed, but the check could not decide; ``detail`` gives
    the reason.
    """

    check: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "?   "}[self.passed]
        return f"{mark} {self.check}  {self.detail}"


class Report(NamedTuple):
    """All findings about one method."""

    name: str
    findings: tuple[Finding, ...]
    # What it proves if all checks passed: "drafter", "rule", or "" if some checks were left out.
    proves: str = ""
    # The rule that was checked; None: a report about a drafter.
    rule: Accept | None = None

    @property
    def passed(self) -> bool:
        """Whether every check passed. False without a check, and if one failed or is not proven."""
        return bool(self.findings) and all(f.passed is True for f in self.findings)

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(f.passed is False for f in self.findings)

    @property
    def not_proven(self) -> tuple[Finding, ...]:
        """The checks that could not decide."""
        return tuple(f for f in self.findings if f.passed is None)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.name} did not pass: nothing was checked"
        width = max(len(f.check) for f in self.findings)
        lines = [str(f._replace(check=f"{f.check:{width}}")) for f in self.findings]
        result = "FAILED" if self.failed else "passed all checks"
        if not self.failed and self.not_proven:
            result = f"did not fail; not proven: {len(self.not_proven)} of {len(lines)} checks"
        return "\n".join([f"{self.name} {result}", *lines])


class Proof(NamedTuple):
    """What a report says about one object."""

    name: str  # of the drafter or the rule
    version: str  # of specjax, in which the checks were made
    passed: bool
    proves: str  # "drafter", "rule", or "" for an incomplete report
    lossless_class: str = ""  # that the rule declares; "": a proof of a drafter
    keys: dict[str, str] | None = None  # ``keys_of`` the rule

    def of(self, method: Drafter | Accept) -> bool:
        """Whether it is about this object."""
        if method.name != self.name:
            return False
        if not isinstance(method, Accept):
            return self.proves == "drafter"
        known = self.lossless_class == method.lossless_class and self.keys == keys_of(method)
        return self.proves == "rule" and known


def of_report(report: Report) -> Proof:
    """The proof that a report made in this process is."""
    rule = report.rule
    own: Any = () if rule is None else (rule.lossless_class, keys_of(rule))
    return Proof(report.name, __version__, report.passed, report.proves, *own)


def write(report: Report, path: Path) -> None:
    """Writes a report as a file for ``config.proof``. Raises UserError."""
    facts = of_report(report)._asdict() | {"findings": report.findings}
    with on_disk(f"cannot write {path}", "name another file"):
        files.write_json(path, {"schema": SCHEMA, **facts})


def read(path: str | Path) -> Proof:
    """The proof in a file that ``write`` made. Raises UserError if it is none."""
    path = buckets.local(path)
    text = jsonl.read(path, f"the proof {path}")
    try:
        value = files.parsed(text)
        if value["schema"] != SCHEMA:
            raise ValueError
        proof = Proof(**{field: value[field] for field in Proof._fields})
        results = [finding[1] for finding in value["findings"]]
    except (ValueError, KeyError, TypeError, IndexError):
        raise UserError(
            f"{path} is no proof; give a file that specjax.bench.proofs.write made, in this version"
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
    known = [p for p in proofs if p.passed and p.version == __version__]
    good = (of_package(x, target) or any(p.of(x) for p in known) for x in (drafter, rule))
    return PROVEN if all(good) else DECLARED


def unused(proofs: Iterable[Proof], methods: Iterable[Drafter | Accept]) -> list[str]:
    """One line for each proof that proves nothing about the drafters and rules ``methods``."""
    measured, lines = list(methods), []
    for proof in proofs:
        if proof.version != __version__:
            why = f"it was made with specjax {proof.version}, and this is {__version__}"
        elif not proof.passed:
            why = "not all of its checks passed"
        elif not proof.proves:
            why = "it is the report of quick checks, or of a drafter without a rule"
        elif not (named := [each for each in measured if each.name == proof.name]):
            why = "no drafter and no rule has this name"
        elif not any(proof.of(each) for each in named):
            why = "it is of another drafter or rule of this name" + _differing(proof, named)
        else:
            continue
        lines.append(f"the proof of {proof.name} is not used: {why}")
    return lines


def _differing(proof: Proof, named: Sequence[Drafter | Accept]) -> str:
    """The class and the keys that differ from those of a rule in ``named``, for a message."""
    rule = next((each for each in named if isinstance(each, Accept)), None)
    if rule is None or proof.proves != "rule":
        return ""
    one, other = (
        {"class": x, **(keys or {})}
        for x, keys in ((proof.lossless_class, proof.keys), (rule.lossless_class, keys_of(rule)))
    )
    differ = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return ": " + ", ".join(f"{k} {one.get(k)}, here {other.get(k)}" for k in differ[:3])


# Rules ------------------------------------------------------------------------------------------


def keys_of(rule: Accept) -> dict[str, str]:
    """What distinguishes a rule from others of its name: values and code of its functions.

    Each value that a function has in its closure, its defaults or its bound arguments, or reads as
    a number or a text of its module, is under "function.name". A function is its name, or a hash
    of its code if it is from elsewhere: a program may be run or imported.
    """
    found: dict[str, str] = {}
    seen: list[Any] = []
    waiting: list[tuple[str, Any]] = [("sampled", rule.sampled), ("greedy", rule.greedy)]
    while waiting:
        name, value = waiting.pop()
        if any(value is each for each in seen):
            continue
        if isinstance(value, tuple | list | dict):
            waiting += [(f"{name}.{key}", each) for key, each in _inside(value)]
        elif (callable(value) or hasattr(value, "__dict__")) and not hasattr(value, "dtype"):
            seen.append(value)
            if hasattr(value, "__qualname__"):
                found[name] = _name_of(value)
            waiting += [(f"{name}.{key}", each) for key, each in _held(value)]
        else:
            found[name] = _as_text(value)
    return dict(sorted(found.items()))


def _held(value: Any) -> Iterator[tuple[Any, Any]]:
    """(name, value) of what a function or an object holds, and of what the former reads."""
    code = getattr(value, "__code__", None)
    if code is None:
        yield from _inside(value)
        return
    yield from _bound(value)
    if not _from_package(value):
        for name in code.co_names:
            each = value.__globals__.get(name)
            if isinstance(each, int | float | str) or getattr(each, "__globals__", None) is (
                value.__globals__
            ):
                yield name, each


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """(name, value) of what a container, a function or an object holds."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, tuple | list | set | frozenset):
        yield from enumerate(value)
    else:
        yield from _bound(value)
        # The attributes of an object that is no class and of no library.
        own, library = getattr(value, "__dict__", None), type(value).__module__.partition(".")[0]
        named = library in LIBRARIES or isinstance(value, type | functools.partial)
        if isinstance(own, dict) and not named:
            yield from own.items()


def _bound(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of bound arguments, defaults and the closure of a function."""
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        return
    for name in ("__wrapped__", "__self__", "__defaults__", "__kwdefaults__"):
        if (each := getattr(value, name, None)) is not None:
            yield name.strip("_"), each
    names = getattr(getattr(value, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(value, "__closure__", None) or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet: a function that names itself
            continue


def _name_of(function: Any) -> str:
    if _from_package(function):
        return f"{function.__module__}.{function.__qualname__}"
    if not hasattr(function, "__code__"):
        return function.__qualname__
    return hashlib.sha256(repr(_code(function.__code__)).encode()).hexdigest()[:12]


def _code(code: CodeType) -> tuple[Any, ...]:
    """What a function computes, without the places of its lines."""
    consts = [sorted(map(repr, x)) if isinstance(x, frozenset) else x for x in code.co_consts]
    inner = [_code(each) if isinstance(each, CodeType) else repr(each) for each in consts]
    return code.co_code, code.co_names, code.co_varnames, inner


def _as_text(value: Any) -> str:
    """A value as text that is equal in every process."""
    if isinstance(value, int | float | str | None):
        return repr(value)
    try:
        array = np.asarray(value)
    except TypeError:  # a key of jax
        return type(value).__qualname__
    if array.dtype == object:
        return type(value).__qualname__
    return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:12]}"


# Objects of the package -------------------------------------------------------------------------


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
        waiting += [part for _, part in _inside(value) if not isinstance(part, PLAIN)]
    return True


def _from_package(function: Any) -> bool:
    module = getattr(function, "__module__", None) or type(function).__module__
    if module == UNPROVEN or module.startswith(UNPROVEN + "."):
        return False
    return module.partition(".")[0] in ("specjax", *LIBRARIES)
