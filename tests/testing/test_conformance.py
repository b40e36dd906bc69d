"""Every drafter with every rule that takes its drafts, through the same checks.

Drafters and rules are discovered, so a new one cannot be left out. The test ids hold the family,
the case and the rule: ``-k heads``, ``-k medusa`` and ``-k traversal`` select pairs. One family
stays on one worker, so that its pairs share compiled programs.

By default every drafter runs with one rule, and each rule with at least one drafter; draft models
run with more, because their siblings are of every kind. ``-m slow`` runs all other pairs.
"""

from __future__ import annotations

import pytest

from specjax import accept, drafters, testing
from specjax.errors import UserError
from specjax.testing import cases, conformance, drafter_checks, mutants
from specjax.types import SIBLINGS

RULES = {name: accept.load(name) for name in accept.names()}
DRAFTERS = {name: cases.case(name).drafter for name in cases.NAMES}
# These cases differ from another one in topology alone: one rule is enough for each.
ONLY = {"irregular": ("recursive",), "ragged": ("traversal",)}
DEFAULT = {
    # Chains. A lossy rule depends on the target's probs alone, so it runs with one drafter.
    "chain": ("block", "chain", "lenient", "match", "rejection", "tolerance", "typical"),
    "none": ("chain",),
    "prompt_lookup": ("block",),
    "llma": ("chain",),
    "ngram_lm": ("block",),
    "sam": ("chain",),
    "jacobi": ("match",),
    "escalate": ("match",),
    "mlp_speculator": ("chain",),
    "bpd": ("match",),
    # Trees: rules that test one node at a time, rules that test a whole tree, and match.
    "iid": ("k_seq", "recursive", "traversal"),
    "independent": ("recursive",),
    "without_replacement": ("recursive", "traversal"),
    "deterministic": ("deterministic", "match", "traversal"),
    "dynamic": ("deterministic",),
    "irregular": ("recursive",),
    "ragged": ("traversal",),
    "token_recycling": ("recursive",),
    "trie": ("deterministic",),
    "suffix": ("recursive",),
    "rest": ("traversal",),
    "lookahead": ("deterministic",),
    "controlled": ("recursive",),
    "medusa": ("deterministic",),
    "hydra": ("traversal",),
}
PAIRS = [
    (case, rule)
    for case, drafter in DRAFTERS.items()
    for rule in ONLY.get(case, RULES)
    if drafter.siblings in RULES[rule].siblings
]


def pair(case, rule):
    family = cases.family(case)
    marks = [pytest.mark.xdist_group(f"conformance {family}")]
    if rule not in DEFAULT[case]:
        marks.append(pytest.mark.slow)
    return pytest.param(case, rule, marks=marks, id=f"{family}-{case}-{rule}")


@pytest.mark.fast
def test_every_drafter_and_rule_is_checked():
    assert {d.name.split(",")[0] for d in DRAFTERS.values()} == set(drafters.names())
    assert {d.siblings for d in DRAFTERS.values()} == set(SIBLINGS)
    assert {rule for _, rule in PAIRS} == set(accept.names())
    by_default = {(case, rule) for case, rules in DEFAULT.items() for rule in rules}
    assert by_default <= set(PAIRS)
    assert {case for case, _ in by_default} == set(DRAFTERS)
    assert {rule for _, rule in by_default} == set(accept.names())


@pytest.mark.parametrize(("case", "rule"), [pair(*names) for names in PAIRS])
def test_pair(case, rule):
    _, target, drafter, params = cases.case(case)
    findings = conformance.check_pair(drafter, RULES[rule], target, params)
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


@pytest.mark.xdist_group("conformance reports")
def test_check_drafter_reports():
    """A correct drafter passes, and the report of a wrong one names the failed check."""
    case = cases.case("chain")
    report = testing.check_drafter(case.drafter, case.target, case.params, [RULES["chain"]])
    assert report.passed and "passed all checks" in str(report) and "exact law" in str(report)
    assert "the drafter's state follows the text" in str(report)
    forgetful = case.drafter._replace(
        update=lambda params, cache, *_: cache.replace(tokens=cache.tokens * 0)
    )
    finding = drafter_checks.state_follows_text(forgetful, case.target, case.params)
    assert finding.passed is False
    # tests/testing/test_mutants.py detects this one by enumeration too.
    wrong = mutants.named("declares_other_probs").change(case.drafter)
    finding = conformance.check_law(
        case.target, wrong, RULES["chain"], case.params, [cases.PROMPT]
    )
    report = testing.Report("wrong", (finding,))
    assert not report.passed and "FAIL" in str(report)
    assert finding.check == "exact law of a round"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("case", "rules"),
    [
        ("chain", "block chain deterministic k_seq match recursive rejection traversal"),
        ("independent", "deterministic match recursive traversal"),
    ],
)
def test_check_drafter_takes_every_lossless_rule(case, rules, monkeypatch):
    finding = testing.Finding("a check", True, "")
    for name in ("well_formed", "state_follows_text"):
        monkeypatch.setattr(drafter_checks, name, lambda *args: finding)
    monkeypatch.setattr(conformance, "check_law", lambda *args: finding)
    monkeypatch.setattr(conformance, "check_pair", lambda *args: [finding])
    _, target, drafter, params = cases.case(case)
    report = testing.check_drafter(drafter, target, params)
    names = {f.check.split(":")[0] for f in report.findings if f.check.endswith(": a check")}
    assert names == set(rules.split())


@pytest.mark.xdist_group("conformance reports")
def test_check_accept_reports():
    wrong = mutants.named("block_stops_at_first_rejection").rule()
    report = testing.check_accept(wrong._replace(lossless_class="L1"), ["chain"])
    assert not report.passed
    raw = mutants.named("one_number_for_coin_and_residual").rule()
    report = testing.check_accept(raw._replace(lossless_class="L1"), ["chain"])
    passed = {f.check: f.passed for f in report.findings}
    # Raw noise cannot be enumerated; counting detects the mistake.
    assert passed["chain, temperature 1.0: exact law of a round"] is None
    assert passed["law, temperature 1.0"] is False


@pytest.mark.fast
def test_check_accept_refuses_unknown_cases():
    for given in ({"names": ["chian"]}, {"loop_case": "chian"}):
        with pytest.raises(UserError, match="unknown case 'chian'; it must be one of none, prom"):
            testing.check_accept(RULES["chain"], **given)
    with pytest.raises(UserError, match="does not take the case iid"):
        testing.check_accept(RULES["chain"], ["chain"], loop_case="iid")
    with pytest.raises(UserError, match="takes none of the cases iid, trie"):
        testing.check_accept(RULES["chain"], ["iid", "trie"])
