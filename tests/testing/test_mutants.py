"""Every mutant is detected, so the test kit can fail; and the reports name what failed."""

from __future__ import annotations

import jax
import pytest

from specjax import accept, testing
from specjax.testing import cases, conformance, drafter_checks, loop, mutants


def caught_by(test):
    """Parametrizes over the mutants that this test must detect."""
    chosen = [mutant for mutant in mutants.MUTANTS if mutant.caught_by == test]
    return pytest.mark.parametrize("mutant", chosen, ids=lambda mutant: mutant.name)


def law_error(mutant, prompt):
    """The total variation between the law of a round's text and the target's law."""
    _, target, drafter, params = cases.case(mutant.case)
    drafter = mutant.change(drafter)
    steps = drafter.longest + 1
    law = testing.exact_law(
        target, drafter, mutant.rule(), params, prompt, steps, rounds=1, **mutant.settings
    )
    truth = testing.sequence_law(target, params.target, prompt, steps, **mutant.settings)
    return testing.total_variation(law, truth)


@pytest.mark.fast
def test_names_are_unique():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names)


@caught_by(mutants.ENUMERATION)
def test_enumeration_detects(mutant):
    errors = []
    with jax.enable_x64(True):
        for prompt in cases.PROMPTS:
            errors.append(law_error(mutant, prompt))
            if errors[-1] > 1e-3:
                return
    pytest.fail(f"{mutant.mistake}: total variations {errors}")


@caught_by(mutants.LEDGER)
def test_the_ledger_detects(mutant):
    with jax.enable_x64(True), pytest.raises(testing.NoiseReused):
        law_error(mutant, cases.PROMPT)


@caught_by(mutants.COUNTING)
def test_counting_detects(mutant):
    _, target, drafter, params = cases.case(mutant.case)
    drafter = mutant.change(drafter)
    steps = drafter.longest + 2
    fit = loop.loop_fit(target, drafter, mutant.rule(), params, cases.PROMPT, steps, 60_000)
    assert fit.p_value < 1e-6


@caught_by(mutants.CONFORMANCE)
def test_conformance_detects(mutant):
    _, target, drafter, params = cases.case(mutant.case)
    findings = conformance.check_pair(mutant.change(drafter), mutant.rule(), target, params)
    assert not testing.Report(mutant.name, tuple(findings)).passed


def test_a_report_names_what_failed():
    """A correct drafter passes, and the report of a wrong one names the failed check."""
    _, target, drafter, params = cases.case("chain")
    rule = accept.load("chain")
    report = testing.check_drafter(drafter, target, params, [rule])
    assert report.passed and "passed all checks" in str(report) and "exact law" in str(report)
    assert "the drafter's state follows the text" in str(report)
    wrong = mutants.named("declares_other_probs").change(drafter)
    finding = conformance.check_law(target, wrong, rule, params, [cases.PROMPT])
    report = testing.Report("wrong", (finding,))
    assert not report.passed and "FAIL" in str(report)
    assert finding.check == "exact law of a round"


def test_a_wrong_cache_of_the_drafter_is_detected():
    _, target, drafter, params = cases.case("chain")
    forgetful = drafter._replace(
        update=lambda params, cache, *_: cache.replace(tokens=cache.tokens * 0)
    )
    assert drafter_checks.state_follows_text(forgetful, target, params).passed is False


def test_a_report_of_a_rule():
    wrong = mutants.named("block_stops_at_first_rejection").rule()
    report = testing.check_accept(wrong._replace(lossless_class="L1"), ["chain"])
    assert not report.passed
    raw = mutants.named("one_number_for_coin_and_residual").rule()
    report = testing.check_accept(raw._replace(lossless_class="L1"), ["chain"])
    passed = {f.check: f.passed for f in report.findings}
    # Raw noise cannot be enumerated; counting detects the mistake.
    assert passed["chain, temperature 1.0: exact law of a round"] is None
    assert passed["law, temperature 1.0"] is False
