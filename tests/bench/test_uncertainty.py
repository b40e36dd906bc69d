"""Standard errors and confidence intervals over prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specjax.bench import metrics, uncertainty
from specjax.bench.passes import Pass
from specjax.bench.uncertainty import Work

pytestmark = pytest.mark.fast

LOOP, PLAIN = [1] * 8, [1, 2, 3, 4, 5]


def test_quantiles_of_student_t():
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 4, 7, 30, 479):
        for level in (0.5, 0.95, 0.999):
            expected = stats.t.ppf((1 + level) / 2, freedom)
            assert uncertainty.student_t(level, freedom) == pytest.approx(expected, rel=1e-9)
    assert uncertainty.student_t(0.95, 1) == pytest.approx(math.tan(0.475 * math.pi))


def test_the_error_of_a_mean_and_of_a_ratio():
    values = [3.0, 5.0, 4.0, 8.0]
    known = np.std(values, ddof=1) / 2
    assert uncertainty.ratio_error(values, [1] * 4) == pytest.approx(known)
    # Prompts with the same ratio say that it is the same everywhere, whatever their sizes.
    assert uncertainty.ratio_error([2, 4, 10], [1, 2, 5]) == 0
    assert uncertainty.ratio_error([2], [1]) is None
    assert uncertainty.ratio_error([2, 0], [1, 0]) is None
    rng = np.random.default_rng(0)
    rounds = rng.integers(5, 30, (2000, 40))
    tokens = rounds * 2.5 + rng.normal(0, 3, rounds.shape)
    ratios = tokens.sum(1) / rounds.sum(1)
    errors = [uncertainty.ratio_error(t, r) for t, r in zip(tokens, rounds, strict=True)]
    assert np.mean(errors) == pytest.approx(ratios.std(), rel=0.05)


def test_errors_of_tau_and_alpha():
    def counts(tokens: int, rounds: int, tested: list[int], passed: list[int]) -> metrics.Counts:
        return metrics.Counts(tokens, rounds, sum(passed), np.array(tested), np.array(passed))

    some = [counts(6, 3, [3, 2], [2, 1]), counts(9, 3, [3, 3], [3, 3])]
    errors = uncertainty.standard_errors(some, [[LOOP], [PLAIN, PLAIN]])
    assert errors["block_efficiency"] == pytest.approx(0.5)  # 2 and 3 tokens, equal weights
    assert errors["acceptance_rate"] == uncertainty.ratio_error([3, 6], [5, 6])
    assert errors["repeated_4grams"] == uncertainty.ratio_error([4, 0], [5, 4])
    nothing = counts(6, 6, [0], [0])
    errors = uncertainty.standard_errors([nothing] * 3, [[[1, 2]]] * 3)
    assert errors["acceptance_rate"] is errors["repeated_4grams"] is None


def test_intervals_contain_the_speedup_of_all_prompts_as_often_as_they_claim():
    """Prompts with different gains and lengths; slow prompts are slow for both methods."""
    rng = np.random.default_rng(1)
    trials, prompts = 3000, 8
    tokens = rng.uniform(20, 60, (trials, prompts))
    hard = np.exp(rng.normal(0, 0.3, tokens.shape))
    gains = np.exp(rng.normal(math.log(2), 0.2, tokens.shape))
    truth = 1 / np.exp(-math.log(2) + 0.2**2 / 2)  # total plain time / total time: E[1] / E[1/gain]
    inside = 0
    for row, slow, gain in zip(tokens, hard, gains, strict=True):
        plain = [Work(n, n * s) for n, s in zip(row, slow, strict=True)]
        fast = [Work(n, n * s / g) for n, s, g in zip(row, slow, gain, strict=True)]
        rate = sum(w.seconds for w in plain) / sum(w.seconds for w in fast)
        low, high = uncertainty.speedup_interval(rate, fast, plain)
        assert low < rate < high
        inside += low < truth < high
    assert 0.91 < inside / trials < 0.97


def test_intervals_are_paired_and_need_two_prompts():
    plain = [Work(10, 1.0), Work(30, 9.0)]
    twice = [Work(10, 0.5), Work(30, 4.5)]
    assert uncertainty.speedup_interval(2.0, twice, plain) == pytest.approx([2.0, 2.0])
    assert uncertainty.speedup_interval(2.0, twice[:1], plain[:1]) is None
    assert uncertainty.speedup_interval(2.0, [Work(0, 0.0), twice[0]], plain) is None
    assert uncertainty.speedup_interval(2.0, [], []) is None


def test_work_is_the_median_over_the_passes():
    def one(seconds: list[float]) -> Pass:
        return Pass([[1, 2], [3], [4]], [], [], seconds, seconds, 0.0, 0.0, 0.0, 1)

    passes = [one([1.0, 1.0, 0.5]), one([4.0, 4.0, 0.4]), one([2.0, 2.0, 0.3])]
    assert uncertainty.works(passes, [[0, 1], [2]]) == [Work(3, 2.0), Work(1, 0.4)]
