"""Every mutant is detected, so the test kit can fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import cases
import jax
import jax.numpy as jnp
import mutants
import numpy as np
import pytest
from mutants import rows

from specjax import accept, outcome, testing
from specjax.drafters.draft_models import draft_model
from specjax.testing import (
    claims,
    conformance,
    exact,
    forecast_checks,
    loop,
    plain_cases,
    state_checks,
)
from specjax.types import ModelParams

# Enumeration runs each operation alone: on one worker each is compiled once for all these files.
pytestmark = pytest.mark.xdist_group("enumeration")


# Mistakes of a kind that another default mutant has, in the same rule or the same check.
SLOW = {
    "siblings_in_reverse_below_the_top",  # forgets_earlier_siblings
    "wrong_interior_path",  # test_paths_are_checked_in_the_counted_loop
    "noise_of_first_round",  # the other noise in the compiled loop
    "coins_keyed_by_position",  # test_raw_noise_is_counted_or_not_proven
    "argmax_next_to_greedy_rows",  # greedy_accepts_ties, coins_of_the_first_row
    "commits_another_node",  # corrupt_below_the_newest
    "forgets_the_last_round",  # corrupt_below_the_newest
    "match_then_resample_on_a_tree",  # match_then_resample
    "equal_siblings_are_merged",  # test_wrong_rules_have_their_wrong_distributions
    "declares_other_probs",  # argmax_with_softmax_probs
    "draws_with_coin_noise",  # one_number_for_coin_and_residual
    "one_threshold_for_the_batch",  # coins_of_the_first_row, drafts_from_the_next_row
}


def caught_by(test):
    """Parametrizes over the mutants that this test must detect."""
    chosen = [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.name in SLOW else [])
        for each in mutants.MUTANTS
        if each.caught_by == test
    ]
    return pytest.mark.parametrize("mutant", chosen)


def law_error(mutant, prompt):
    """The total variation between the law of a round's text and the target's law."""
    case = cases.named(mutant.case)
    drafter, prompt = mutant.change(case.drafter), plain_cases.prompt(case, prompt)
    steps = drafter.longest + 1
    result = exact.enumerated(
        *(case.target, drafter, mutant.rule(), case.params, prompt, steps),
        rounds=1,
        **mutant.settings,
    )
    return testing.total_variation(result.law, result.truth)


@pytest.mark.fast
def test_names_are_unique():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names) and set(names) > SLOW


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


@caught_by(mutants.PATHS)
def test_paths_detect(mutant):
    with jax.enable_x64(True), pytest.raises(testing.WrongVerdict):
        for prompt in cases.PROMPTS:
            law_error(mutant, prompt)


def test_paths_are_checked_in_the_counted_loop():
    mutant = mutants.named("wrong_interior_path")
    _, target, drafter, params = cases.case("iid")
    with pytest.raises(testing.WrongVerdict, match="rows the rule gave a path on which"):
        loop.loop_fit(target, drafter, mutant.rule(), params, cases.PROMPT, 4, 1000)


@pytest.mark.slow
@caught_by(mutants.PATHS)
def test_paths_detect_in_the_compiled_loop(mutant):
    _, target, drafter, params = cases.named(mutant.case)
    findings = conformance.check_pair(drafter, mutant.rule(), target, params)
    assert {f.check: f.passed for f in findings}["paths are paths of the draft"] is False


def test_an_end_that_is_looked_for_at_the_last_token_only(monkeypatch):
    """An end-of-sequence token inside an accepted draft is then followed by the rest of it."""

    def last_only(verdict, state, eos_id):
        verdict, _ = right(verdict, state, None)
        last = jnp.take_along_axis(verdict.tokens, jnp.maximum(verdict.count - 1, 0)[:, None], 1)
        return verdict, jnp.isin(last[:, 0], outcome.stop_ids(eos_id)) & (verdict.count > 0)

    right = outcome.cut
    monkeypatch.setattr(outcome, "cut", last_only)
    _, target, drafter, params = cases.named("chain")
    # A function of its own, so that no compiled program without the mistake is taken.
    own = drafter._replace(update=lambda *arguments: drafter.update(*arguments))
    findings = conformance.check_pair(own, accept.load("chain"), target, params)
    assert {f.check: f.passed for f in findings}["EOS and limits only cut"] is False


@caught_by(mutants.COUNTING)
def test_counting_detects(mutant):
    _, target, drafter, params = cases.case(mutant.case)
    drafter = mutant.change(drafter)
    steps = drafter.longest + 2
    fit = loop.loop_fit(target, drafter, mutant.rule(), params, cases.PROMPT, steps, 120_000)
    assert fit.p_value < 1e-6


@caught_by(mutants.CONFORMANCE)
def test_conformance_detects(mutant):
    _, target, drafter, params = cases.case(mutant.case)
    findings = conformance.check_pair(mutant.change(drafter), mutant.rule(), target, params)
    assert testing.Report(mutant.name, tuple(findings)).failed


@caught_by(mutants.CLAIMS)
def test_claims_detect(mutant):
    _, target, drafter, params = cases.case(mutant.case)
    later = (2,) if mutant.name == "wrong_in_later_rounds" else ()
    settings = conformance.SETTINGS[mutant.name == "claims_another_temperature" :][:1]
    finding = claims.drawn_as_declared(
        target, mutant.change(drafter), params, [cases.PROMPT], settings, later
    )
    assert finding.passed is False and "declared" in finding.detail


# Name of the mutant -> the probabilities of the target and the draft, and the mutant's law.
STATED = {
    # DSpark, appendix A.
    "length_after_looking": ((0.7, 0.3), (0.5, 0.5), (0.85, 0.15)),
    # keras-hub's sampler: the argmax, accepted with p / q; a rejection gives the other token.
    "argmax_with_softmax_probs": ((0.5, 0.5), (0.5945, 0.4055), (0.5 / 0.5945, 1 - 0.5 / 0.5945)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("length_after_looking", marks=pytest.mark.slow),
        "argmax_with_softmax_probs",
    ],
)
def test_wrong_laws_that_are_stated(name):
    """With one draft token, (.7, .3) becomes (.85, .15), and (.5, .5) becomes (.841, .159)."""
    target, draft = testing.tabular(2), testing.tabular(2, "draft")
    *probs, wrong = STATED[name]
    constant = [jnp.log(jnp.broadcast_to(jnp.array(p), (3, 2, 2))) for p in probs]
    drafter = draft_model.make(target, model=draft, gamma=1)
    laws = []
    with jax.enable_x64(True):
        params = ModelParams(*(jnp.asarray(np.asarray(table, np.float64)) for table in constant))
        for each in (drafter, mutants.named(name).change(drafter)):
            rule = accept.load("chain")
            laws.append(testing.exact_law(target, each, rule, params, [0, 1], 1, rounds=1))
    np.testing.assert_allclose(laws, [probs[0], wrong], atol=1e-7)


@caught_by(mutants.STATE)
def test_states_detect(mutant):
    # A table reads two entries of its cache: this one needs a real decoder.
    real = mutant.name == "corrupt_below_the_newest"
    _, target, drafter, params = (cases.real if real else cases.case)(mutant.case)
    finding = state_checks.state_follows_text(mutant.change(drafter), target, params)
    assert finding.passed is not True


@caught_by(mutants.FORECAST)
def test_forecasts_detect(mutant):
    _, target, drafter, params = cases.case(mutant.case)
    finding = forecast_checks.forecast_equals_decoding(mutant.change(drafter), target, params)
    assert finding.passed is False


@caught_by(mutants.WIDTHS)
def test_widths_detect(mutant):
    _, target, drafter, params = cases.case(mutant.case)
    assert state_checks.widths_do_not_matter(drafter, target, params).passed
    finding = state_checks.widths_do_not_matter(mutant.change(drafter), target, params)
    assert finding.passed is False


@caught_by(mutants.USE)
def test_check_accept_detects(mutant):
    """A rule that is exact and useless, or that raises."""
    rule = mutant.rule()._replace(lossless_class="L1", siblings=("chain",))
    report = testing.check_accept(rule, quick=True, first_failure=True, progress=False)
    assert report.failed


@pytest.mark.parametrize("mutant", rows.ROWS, ids=lambda mutant: mutant.name)
def test_a_default_test_detects(mutant, monkeypatch):
    """Mistakes that changed no text of the first tier; the test is that of ``caught_by``."""
    module, name = mutant.caught_by.split("::")
    path = Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"default_{module}", path)
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    getattr(tests, name)()
    mutant.change(monkeypatch)
    with pytest.raises(AssertionError):
        getattr(tests, name)()
