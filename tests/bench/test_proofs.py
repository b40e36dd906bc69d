"""Which lossless classes are proven, and which are only declared."""

from __future__ import annotations

import functools
import json

import pytest

from specjax import accept, drafters, testing
from specjax.bench import proofs
from specjax.errors import UserError
from specjax.testing import cases
from specjax.testing.findings import Finding, Report

pytestmark = pytest.mark.fast

TARGET = testing.tabular(3)
LOOKUP, CHAIN = drafters.make("prompt_lookup", TARGET, gamma=2), accept.load("chain")


def report(name: str, *passed: bool | None, proves: str = "rule") -> Report:
    findings = tuple(Finding(f"check {n}", each, "") for n, each in enumerate(passed))
    return Report(name, findings, proves)


def own_rule(name: str = "mine"):
    """A rule from outside the package: a function around the package's."""

    def sampled(keys, draft, probs):
        return CHAIN.sampled(keys, draft, probs)

    return CHAIN._replace(sampled=sampled, name=name)


def test_rules_and_drafters_of_the_package_are_proven():
    for name in accept.names():
        rule = accept.load(name)
        assert proofs.of_package(rule), name
        expected = None if rule.lossless_class == "L3" else "proven"
        assert proofs.status(LOOKUP, rule) == expected, name


@pytest.mark.parametrize("name", [name for name in cases.NAMES if name != "ragged"])
def test_drafters_of_the_package_are_proven_on_every_model(name):
    case = cases.case(name)
    # Heads use functions of the target, which is no part of the method.
    assert proofs.of_package(case.drafter, case.target)


def test_functions_from_elsewhere_are_only_declared():
    case = cases.case("chain")
    changed = [
        LOOKUP._replace(propose=lambda *args: LOOKUP.propose(*args)),
        # Inside the package's functions, as an argument or in a closure.
        LOOKUP._replace(propose=functools.partial(LOOKUP.propose, lambda: None)),
        LOOKUP._replace(learn=enclosing(lambda: None)),
        cases.case("ragged").drafter,  # specjax.testing has wrong methods too
    ]
    for drafter in changed:
        assert proofs.status(drafter, CHAIN, TARGET) == "declared"
    assert proofs.status(LOOKUP, own_rule()) == "declared"
    assert proofs.status(case.drafter, CHAIN, case.target) == "proven"
    typical = accept.load("typical")
    assert proofs.status(changed[0], typical) is None  # class L3 claims nothing


def enclosing(function):
    """A function of the package that has ``function`` in its closure."""

    def outer():
        return function()

    outer.__module__ = "specjax.drafters.lookup.suffix"
    return outer


def test_a_report_of_this_version_proves_the_object_of_its_name():
    rule = own_rule()

    def status(*reports):
        return proofs.status(LOOKUP, rule, TARGET, [proofs.of_report(each) for each in reports])

    assert status(report("mine", True, True)) == "proven"
    assert status(report("mine", True, None)) == "declared"  # a check that could not decide
    assert status(report("mine")) == "declared"  # no check at all
    assert status(report("other", True)) == "declared"
    assert status(report("mine", True, proves="")) == "declared"  # quick
    assert status(report("mine", True, proves="drafter")) == "declared"  # a drafter of this name
    old = proofs.Proof("mine", "0.0.1", True, "rule")
    assert proofs.status(LOOKUP, rule, TARGET, [old]) == "declared"
    reports = report("x", True), report("y", False), report("mine", True, proves="")
    given = [old, *(proofs.of_report(each) for each in reports)]
    good = proofs.Proof("mine", proofs.__version__, True, "rule")
    lines = proofs.unused([*given, good], ["mine"])
    assert len(lines) == 4 and "quick checks" in lines[3] and "made with specjax 0.0.1" in lines[0]
    assert "no rule has this name" in lines[1] and "not all of its checks passed" in lines[2]


def test_proofs_go_to_disk_and_back(tmp_path):
    path = tmp_path / "proof.json"
    for passed in (True, False, None):
        proofs.write(report("mine", True, passed), path)
        expected = proofs.Proof("mine", proofs.__version__, passed is True, "rule")
        assert proofs.read(path) == expected
    value = json.loads(path.read_text()) | {"passed": True}
    path.write_text(json.dumps(value))
    assert not proofs.read(path).passed  # the findings count
    for text in ("{", "[]", '{"schema": 2}', '{"schema": 1, "name": "a"}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"proof.json is no proof; give a file"):
            proofs.read(path)
    with pytest.raises(UserError, match="cannot be read"):
        proofs.read(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot write"):
        proofs.write(report("mine", True), tmp_path / "none" / "x.json")
