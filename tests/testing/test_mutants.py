"""Every mutant of the registry dies, and its healthy counterpart lives: the kit can fail."""

from __future__ import annotations

import jax
import pytest

from specjax import testing
from specjax.testing import cases, conformance, loop, mutants

NAMES = [m.name for m in mutants.MUTANTS]
CASES = {m.name: m for m in mutants.MUTANTS}


def of(kind):
    return [m for m in mutants.MUTANTS if m.killed_by == kind]


def test_names_are_unique():
    assert len(set(NAMES)) == len(NAMES)


def error(mutant, prompt):
    case = cases.case(mutant.case)
    drafter, rule = mutant.change(case.drafter), mutant.rule()
    steps = drafter.longest + 1
    found = testing.exact_law(
        case.target, drafter, rule, case.params, prompt, steps, rounds=1, **mutant.settings
    )
    truth = testing.sequence_law(case.target, case.params.target, prompt, steps, **mutant.settings)
    return testing.total_variation(found, truth)


@pytest.mark.parametrize("mutant", of(mutants.ENUMERATION), ids=lambda m: m.name)
def test_enumeration_kills(mutant):
    with jax.enable_x64(True):
        seen = []
        for prompt in cases.PROMPTS:
            seen.append(error(mutant, prompt))
            if seen[-1] > 1e-3:
                return
    pytest.fail(f"{mutant.what}: total variations {seen}")


@pytest.mark.parametrize("mutant", of(mutants.LEDGER), ids=lambda m: m.name)
def test_the_ledger_kills(mutant):
    with jax.enable_x64(True), pytest.raises(testing.NoiseReused):
        error(mutant, cases.PROMPT)


@pytest.mark.parametrize("mutant", of(mutants.COUNTING), ids=lambda m: m.name)
def test_counting_kills(mutant):
    case = cases.case(mutant.case)
    drafter = mutant.change(case.drafter)
    fit = loop.loop_fit(
        case.target, drafter, mutant.rule(), case.params, cases.PROMPT, drafter.longest + 2, 60_000
    )
    assert fit.p_value < 1e-6


@pytest.mark.parametrize("mutant", of(mutants.CONFORMANCE), ids=lambda m: m.name)
def test_conformance_kills(mutant):
    case = cases.case(mutant.case)
    found = conformance.check_pair(
        mutant.change(case.drafter), mutant.rule(), case.target, case.params
    )
    assert not conformance.Report(mutant.name, tuple(found)).passed
