"""Every drafter with every rule that takes its drafts, through the same checks.

Drafters and rules are discovered, so a new one cannot be left out. The test ids hold the family,
the case and the rule: ``-k heads``, ``-k medusa`` and ``-k traversal`` select pairs. One family
stays on one worker, so that its pairs share compiled programs.

By default every drafter runs with at least one rule, and every rule with at least one drafter.
``-m slow`` runs all other pairs.
"""

from __future__ import annotations

from typing import Any

import cases
import pytest

from specjax import accept, drafters, testing
from specjax.errors import UserError
from specjax.testing import (
    claims,
    conformance,
    drafter_checks,
    forecast_checks,
    pair_checks,
    state_checks,
)
from specjax.types import SIBLINGS

RULES = {name: accept.load(name) for name in accept.names()}
DRAFTERS = {name: cases.case(name).drafter for name in cases.NAMES}
# Rules of the pairs that run by default; in every pair the drafts of some rows are ragged.
# Together: i.i.d. siblings with k_seq, gbv and recursive; siblings without replacement with
# traversal; deterministic ones with match, deterministic, recursive and traversal; independent ones
# with recursive (test_laws.py enumerates the others). A lossy rule depends on the target's probs
# alone, so it runs with one drafter.
DEFAULT = {name: rules for name, rules in cases.RULES.items() if rules and name in cases.NAMES}
PAIRS = [(case, rule) for case, rule, _ in cases.pairs()]


def pair(case, rule):
    family = cases.family(case)
    marks = [pytest.mark.xdist_group(f"conformance {family}")]
    if rule not in DEFAULT.get(case, ()):
        marks.append(pytest.mark.slow)
    return pytest.param(case, rule, marks=marks, id=f"{family}-{case}-{rule}")


@pytest.mark.fast
def test_every_drafter_and_rule_is_checked():
    named = {d.name.split(",")[0] for d in DRAFTERS.values()}
    # tests/test_encoder_decoder.py runs the pairs of drafters of encoder-decoder models alone.
    named |= {cases.with_encoder(name).drafter.name for name in cases.ENCODER_NAMES}
    assert named == set(drafters.names())
    assert {d.siblings for d in DRAFTERS.values()} == set(SIBLINGS)
    assert {rule for _, rule in PAIRS} == set(accept.names())
    by_default = {(case, rule) for case, rules in DEFAULT.items() for rule in rules}
    assert by_default <= set(PAIRS)
    assert {rule for _, rule in by_default} == set(accept.names())


@pytest.mark.parametrize(("case", "rule"), [pair(*names) for names in PAIRS])
def test_pair(case, rule):
    _, target, drafter, params = cases.case(case)
    # In the first tier the law is counted at one of the settings, in turns, on half of the rows.
    keys: dict[str, Any] = {"more": cases.SETTINGS.get(case)}
    if rule in DEFAULT.get(case, ()):
        number = list(DEFAULT).index(case) % len(pair_checks.SETTINGS)
        keys |= {"settings": pair_checks.SETTINGS[number : number + 1], "rows": 6_000}
    findings = conformance.check_pair(drafter, RULES[rule], target, params, **keys)
    report = testing.Report(f"{case} with {rule}", tuple(findings))
    assert report.passed, str(report)


def test_other_pairs_are_refused_before_compiling():
    for case, drafter in DRAFTERS.items():
        for name, rule in RULES.items():
            if drafter.siblings not in rule.siblings:
                _, target, _, params = cases.case(case)
                message = f"the rule {name} takes drafts with siblings {rule.siblings[0]}"
                with pytest.raises(UserError, match=message):
                    conformance.check_pair(drafter, rule, target, params)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("case", "rules"),
    [
        ("chain", "block chain deterministic gbv k_seq match recursive rejection traversal"),
        ("independent", "deterministic match recursive traversal"),
    ],
)
def test_check_drafter_takes_every_lossless_rule(case, rules, monkeypatch):
    finding = testing.Finding("a check", True, "")
    for module, name in (
        (drafter_checks, "well_formed"),
        (drafter_checks, "probs_of_text"),
        (claims, "drawn_as_declared"),
        (state_checks, "state_follows_text"),
        (state_checks, "widths_do_not_matter"),
        (forecast_checks, "forecast_equals_decoding"),
        (conformance, "check_law"),
    ):
        monkeypatch.setattr(module, name, lambda *args, **keys: finding)
    monkeypatch.setattr(conformance, "check_pair", lambda *args: [finding])
    _, target, drafter, params = cases.case(case)
    report = testing.check_drafter(drafter, target, params, progress=False)
    assert report.passed
    names = {f.check.split(":")[0] for f in report.findings if f.check.endswith(": a check")}
    assert names == set(rules.split())


@pytest.mark.fast
def test_check_drafter_refuses_a_rule_for_other_drafts():
    _, target, drafter, params = cases.case("iid")
    with pytest.raises(UserError, match="the rule chain takes drafts with siblings chain"):
        testing.check_drafter(drafter, target, params, [RULES["chain"]])
