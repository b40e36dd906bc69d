"""Which lossless classes are proven, and which are only declared."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import cases
import jax.numpy as jnp
import pytest

from specjax import accept, drafters, testing
from specjax.bench import proofs
from specjax.errors import UserError
from specjax.testing.findings import Finding, Report

pytestmark = pytest.mark.fast

TARGET = testing.tabular(3)
LOOKUP, CHAIN = drafters.make("prompt_lookup", TARGET, gamma=2), accept.load("chain")


def report(name: str, *passed: bool | None, proves: str = "rule", rule=None) -> Report:
    findings = tuple(Finding(f"check {n}", each, "") for n, each in enumerate(passed))
    return Report(name, findings, proves, rule or (own_rule(name) if proves == "rule" else None))


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
        LOOKUP._replace(rare=LOOKUP.rare._replace(learn=enclosing(lambda: None))),
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
    old = proofs.of_report(report("mine", True))._replace(version="0.0.1")
    assert proofs.status(LOOKUP, rule, TARGET, [old]) == "declared"
    reports = report("x", True), report("y", False), report("mine", True, proves="")
    given = [old, *(proofs.of_report(each) for each in reports)]
    good = proofs.of_report(report("mine", True))
    lines = proofs.unused([*given, good], [LOOKUP, rule])
    assert len(lines) == 4 and "quick checks" in lines[3] and "made with specjax 0.0.1" in lines[0]
    assert "no rule has this name" in lines[1] and "not all of its checks passed" in lines[2]


LEAST = 0.5


def keyed(threshold=0.5, **changes):
    """A rule with a key, as a user's ``make``, always of the same name."""

    def sampled(keys, draft, probs):
        verdict = CHAIN.sampled(keys, draft, probs)
        return verdict.replace(count=jnp.where(threshold > LEAST, 1, verdict.count))

    return CHAIN._replace(sampled=sampled, name="mine", **changes)


def same_name_other_code():
    def sampled(keys, draft, probs):
        verdict = CHAIN.sampled(keys, draft, probs)
        return verdict.replace(count=verdict.count)

    return CHAIN._replace(sampled=sampled, name="mine")


def with_defaults(threshold):
    def sampled(keys, draft, probs, threshold=threshold):
        return CHAIN.sampled(keys, draft, probs * threshold)

    return CHAIN._replace(sampled=sampled, name="mine")


def with_a_table(threshold):
    table = jnp.asarray([1.0, threshold])

    def sampled(keys, draft, probs):
        return CHAIN.sampled(keys, draft, probs * table[0])

    return CHAIN._replace(sampled=sampled, name="mine")


def as_partial(threshold):
    sampled = functools.partial(lambda keys, draft, probs, threshold: 0, threshold=threshold)
    return CHAIN._replace(sampled=sampled, name="mine")


@pytest.mark.parametrize("make", [keyed, with_defaults, with_a_table, as_partial])
def test_a_rule_with_other_keys_is_another_rule(make, tmp_path):
    """The report of one does not count for the other; that of the same keys does."""
    proofs.write(report("mine", True, rule=make(0.25)), tmp_path / "proof.json")
    proof = proofs.read(tmp_path / "proof.json")
    assert proofs.status(LOOKUP, make(0.25), TARGET, [proof]) == "proven"
    assert proofs.status(LOOKUP, make(0.75), TARGET, [proof]) == "declared"
    [line] = proofs.unused([proof], [LOOKUP, make(0.75)])
    assert "of another drafter or rule of this name: sampled" in line and "\n" not in line
    assert not proofs.unused([proof], [LOOKUP, make(0.25)])


def test_a_rule_of_another_class_or_code_is_another_rule(monkeypatch):
    proof = proofs.of_report(report("mine", True, rule=keyed()))
    others = (keyed(lossless_class="L2"), same_name_other_code(), own_rule(), keyed(greedy=max))
    for other in others:
        assert proofs.status(LOOKUP, other, TARGET, [proof]) == "declared"
    [line] = proofs.unused([proof], [keyed(lossless_class="L2")])
    assert line.endswith("of this name: class L1, here L2")
    drafter = LOOKUP._replace(name="mine", propose=lambda *args: LOOKUP.propose(*args))
    assert proofs.status(drafter, CHAIN, TARGET, [proof]) == "declared"
    # A number of the module that the rule reads.
    monkeypatch.setitem(globals(), "LEAST", 0.25)
    assert proofs.status(LOOKUP, keyed(), TARGET, [proof]) == "declared"


def test_keys_of_a_rule_are_equal_in_every_process():
    """No address of an object and no order of a set is among them."""
    code = (
        "from specjax import accept; from specjax.bench import proofs\n"
        "def check(keys, draft, probs, kinds=('a', {1: 'b'})):\n"
        "    return keys in {'x', 'y', 'z'}, [x for x in probs]\n"
        "print(proofs.keys_of(accept.load('chain')._replace(sampled=check)))"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", code], text=True, capture_output=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(shown) == 1 and "sampled.defaults.0.1.1" in shown.pop()


def test_proofs_go_to_disk_and_back(tmp_path):
    path = tmp_path / "proof.json"
    for passed in (True, False, None):
        proofs.write(report("mine", True, passed), path)
        expected = proofs.of_report(report("mine", True))._replace(passed=passed is True)
        assert proofs.read(path) == expected and expected.lossless_class == "L1"
    value = json.loads(path.read_text()) | {"passed": True}
    path.write_text(json.dumps(value))
    assert not proofs.read(path).passed  # the findings count
    early = {key: x for key, x in value.items() if key not in ("lossless_class", "keys")}
    for text in ("{", "[]", '{"schema": 2}', json.dumps(early), json.dumps(value | {"schema": 1})):
        path.write_text(text)
        with pytest.raises(UserError, match=r"proof.json is no proof; give a file"):
            proofs.read(path)
    with pytest.raises(UserError, match="cannot be read"):
        proofs.read(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot write"):
        proofs.write(report("mine", True), tmp_path / "none" / "x.json")
