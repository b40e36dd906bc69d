"""Chains: the closed forms against published numbers and against independent simulations."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import testing, theory
from specjax.errors import UserError

pytestmark = pytest.mark.fast
TARGET, DRAFT = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
few = settings(max_examples=40, deadline=None)
rates = st.floats(0, 1)


# Acceptance.


def test_overlap_of_one_position():
    """sum min(target, draft) = .6."""
    assert theory.overlap(TARGET, DRAFT) == pytest.approx(0.6)
    assert theory.divergence(TARGET, DRAFT) == pytest.approx(0.4)
    both = np.stack([TARGET, DRAFT]), np.stack([DRAFT, DRAFT])
    np.testing.assert_allclose(theory.overlap(*both), [0.6, 1])
    assert theory.acceptance_rate(*both) == pytest.approx(0.8)
    assert theory.acceptance_rate(*both, weights=[3, 1]) == pytest.approx(0.7)


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=1, max_size=6))
@few
def test_divergence_is_a_distance_and_one_minus_the_overlap(pairs):
    target, draft = (weights / weights.sum() for weights in np.array(pairs).T)
    distance = theory.divergence(target, draft)
    assert 0 <= distance <= 1 and distance == pytest.approx(1 - theory.overlap(target, draft))
    assert distance == pytest.approx(theory.divergence(draft, target))
    assert theory.divergence(draft, draft) == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_best_acceptance_is_that_of_the_linear_program(count):
    """Over all couplings, for dense, sparse and equal distributions; no set of tokens is lower."""
    generator = np.random.default_rng(count)
    pairs = [generator.dirichlet(np.full(4, size), 2) for size in (1, 0.3, 0.1)]
    zeros = np.array([[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0]])
    pairs += [zeros, zeros[::-1], zeros[:1].repeat(2, 0), np.eye(4)[:2], zeros * 0 + 0.25]
    for target, draft in pairs:
        drawn = Counter()
        for each in itertools.product(range(4), repeat=count):
            drawn[frozenset(each)] += float(np.prod(draft[list(each)]))
        best = theory.best_acceptance(target, draft, count)
        program = testing.best_coverage(target, list(drawn), list(drawn.values()))
        assert best == pytest.approx(program, abs=1e-9)
        sets = [list(each) for n in range(5) for each in itertools.combinations(range(4), n)]
        cuts = [target[each].sum() + 1 - draft[each].sum() ** count for each in sets]
        assert best == pytest.approx(min(cuts), abs=1e-12)
    target, draft = np.array(pairs[:3]).swapaxes(0, 1)
    together = theory.best_acceptance(target, draft, count)
    alone = [theory.best_acceptance(*each, count) for each in pairs[:3]]
    np.testing.assert_allclose(together, alone, atol=1e-15)
    if count == 1:
        np.testing.assert_allclose(together, theory.overlap(target, draft), atol=1e-15)


def simulate(generator, gamma, samples):
    """(share of accepted draft tokens, tokens per round) of speculative sampling."""
    tokens = generator.choice(3, (samples, gamma), p=DRAFT)
    accepted = generator.random((samples, gamma)) * DRAFT[tokens] < TARGET[tokens]
    emitted = np.where(accepted.all(1), gamma, accepted.argmin(1)) + 1
    return accepted.mean(), emitted.mean()


def test_simulated_rounds():
    alpha = theory.acceptance_rate(TARGET[None], DRAFT[None])
    for gamma in (1, 3, 8):
        accepted, tokens = simulate(np.random.default_rng(gamma), gamma, 40_000)
        assert accepted == pytest.approx(alpha, abs=0.01)
        assert tokens == pytest.approx(theory.expected_tokens(alpha, gamma), rel=0.015)
    # So many draft tokens are never all accepted: every draft has a first rejection.
    tokens = simulate(np.random.default_rng(0), 60, 20_000)[1]
    assert tokens == pytest.approx(1 / (1 - alpha), rel=0.02)


def test_simulated_depths():
    """Each depth has another acceptance."""
    acceptance = np.array([0.9, 0.5, 0.7])
    accepted = np.random.default_rng(0).random((40_000, 3)) < acceptance
    tokens = 1 + np.cumprod(accepted, 1).sum(1).mean()
    assert tokens == pytest.approx(theory.expected_tokens_by_depth(acceptance), rel=0.015)
    assert theory.expected_tokens_by_depth([]) == 1


@given(rates, st.integers(0, 40))
@few
def test_expected_tokens_is_the_sum_of_powers(alpha, gamma):
    tokens = theory.expected_tokens(alpha, gamma)
    assert isinstance(tokens, float)
    assert tokens == pytest.approx(sum(alpha**i for i in range(gamma + 1)))
    assert tokens == pytest.approx(theory.expected_tokens_by_depth([alpha] * gamma))


def test_expected_tokens_at_the_ends():
    assert theory.expected_tokens(1.0, 4) == 5 and theory.expected_tokens(0.0, 4) == 1
    assert theory.expected_tokens(1 - 1e-15, 4) == pytest.approx(5)
    np.testing.assert_allclose(theory.expected_tokens(np.array([0, 0.5, 1]), 2), [1, 1.75, 3])


# The tables of Leviathan et al. (2211.17192).


@pytest.mark.parametrize(
    ("alpha", "gamma", "work", "gain"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1(alpha, gamma, work, gain):
    """c and c-hat are 0. The paper prints one digit less of some of these."""
    assert round(theory.operations(alpha, gamma, 0), 2) == work
    assert round(theory.walltime_improvement(alpha, gamma, 0), 2) == gain
    assert round(theory.expected_tokens(alpha, gamma), 2) == gain


BEST = {  # c: (gamma, speed-up) at alpha .5, .6, .7, .8, .9
    0.01: [(5, 1.88), (7, 2.30), (9, 2.97), (14, 4.23), (24, 7.49)],
    0.02: [(4, 1.79), (6, 2.17), (8, 2.76), (11, 3.82), (19, 6.37)],
    0.05: [(3, 1.63), (4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67)],
    0.10: [(2, 1.46), (3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43)],
    0.20: [(1, 1.25), (2, 1.40), (3, 1.58), (4, 1.87), (7, 2.37)],
}


@pytest.mark.parametrize("c", BEST)
def test_optimal_gamma(c):
    for alpha, (gamma, gain) in zip((0.5, 0.6, 0.7, 0.8, 0.9), BEST[c], strict=True):
        result = theory.optimal_gamma(alpha, c)
        assert (result[0], round(result[1], 2)) == (gamma, gain)
        assert result[1] == theory.walltime_improvement(alpha, gamma, c)
        tokens = theory.expected_tokens(alpha, gamma)
        assert result[1] == pytest.approx(theory.speedup(tokens, gamma * c, 1.0))


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "gain"),
    [(0.75, 7, 0.02, 3.2), (0.80, 7, 0.04, 3.3), (0.82, 7, 0.11, 2.5)],
)
def test_predictions_for_t5(alpha, gamma, c, gain):
    """English to German at temperature 0, with the small, the base and the large draft model."""
    assert round(theory.walltime_improvement(alpha, gamma, c), 1) == gain


def test_the_factors_of_a_loop():
    """Chen et al. 2023, Chinchilla: 14.1 ms, a draft of 1.8 ms per token, K = 4, r' = 0.8."""
    share, whole = theory.loop_factors(4.0, 4, 1.8 / 14.1)
    assert share == pytest.approx(0.8)
    assert (round(whole, 2), round(share * whole, 2)) == (3.31, 2.65)
    for alpha, gamma in ((0.6, 1), (0.8, 3), (0.9, 8)):
        tokens, verify = theory.expected_tokens(alpha, gamma), {gamma + 1: 1.4}
        factors = theory.loop_factors(tokens, gamma, 0.1, verify)
        gain = theory.walltime_improvement(alpha, gamma, 0.1, verify)
        assert np.prod(factors) == pytest.approx(gain)


@given(rates, st.floats(0.01, 1.5))
@few
def test_corollary_3_9(alpha, c):
    gamma, gain = theory.optimal_gamma(alpha, c, limit=60)
    assert (gain > 1) == (alpha > c)
    if alpha <= c:
        assert (gamma, gain) == (0, 1.0)
    one = theory.walltime_improvement(alpha, 1, c)
    assert one == pytest.approx((1 + alpha) / (1 + c)) and gain >= one - 1e-9


@given(rates, st.integers(0, 30), st.floats(0, 2))
@few
def test_work_is_never_below_plain_decoding(alpha, gamma, c_hat):
    work = theory.operations(alpha, gamma, c_hat)
    assert work >= 1 - 1e-9
    product = work * theory.walltime_improvement(alpha, gamma, 0)
    assert product == pytest.approx(gamma * c_hat + gamma + 1)


# Measured costs.


def test_measured_verification():
    """If each verified token costs a step, every draft is a loss. All forms of costs are equal."""
    assert theory.optimal_gamma(0.9, 0.01, verify=lambda n: float(n)) == (0, 1.0)
    forms = (
        lambda n: 1 + 0.25 * (n - 1),
        {5: 2.0},
        {1: 1.0, 3: 1.5, 5: 2},
        [1.0, 1.25, 1.5, 1.75, 2.0],
    )
    for verify in forms:
        assert theory.verify_cost(verify, 4) == pytest.approx(1.75)
        gain = theory.walltime_improvement(0.8, 3, 0.1, verify)
        assert gain == pytest.approx(theory.expected_tokens(0.8, 3) / (0.3 + 1.75))
    # Up to the largest measured pass.
    assert theory.optimal_gamma(0.95, 0.01, verify={5: 1.0})[0] == 4
    slow = theory.optimal_gamma(0.8, 0.02, verify=forms[0])
    assert slow[0] < theory.optimal_gamma(0.8, 0.02)[0] and slow[1] > 1
    with pytest.raises(UserError, match="verify has times for up to 5 tokens, not for 6"):
        theory.walltime_improvement(0.8, 5, 0.1, {5: 2.0})


# Mistakes.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tokens(1.1, 3), "alpha is 1.1; it must be between 0 and 1"),
        (lambda: theory.expected_tokens(math.nan, 3), "alpha is nan; it must be a finite number"),
        (lambda: theory.expected_tokens(np.array([0.5, -0.5]), 3), "alpha is -0.5"),
        (lambda: theory.expected_tokens(0.5, -1), "gamma is -1; it must be a whole number >= 0"),
        (lambda: theory.expected_tokens(0.5, 1.5), "gamma is 1.5; it must be a whole number >= 0"),
        (lambda: theory.expected_tokens("half", 1), "alpha is 'half'; it must be a number"),
        (lambda: theory.expected_tokens(10**400, 3), "alpha is larger than a float can be"),
        (
            lambda: theory.expected_tokens(0.5, 10**400),
            "gamma is a number of about 400 digits; it must be",
        ),
        (lambda: theory.expected_tokens_by_depth([0.5, 2]), "acceptance is 2"),
        (lambda: theory.expected_tokens_by_depth([[0.5], [0.6]]), "acceptance has shape (2, 1)"),
        (lambda: theory.expected_tokens(-1.0, 1), "alpha is -1"),
        (lambda: theory.walltime_improvement(0.5, 2, -0.1), "c is -0.1; it must be at least 0"),
        (
            lambda: theory.walltime_improvement(0.5, 2, 0.1, lambda n: 0),
            "verify(3) is 0; it must be positive",
        ),
        (lambda: theory.walltime_improvement(0.5, 2, 0.1, {3: math.nan}), "verify[3] is nan"),
        (
            lambda: theory.walltime_improvement(0.5, "3", 0.1),
            "gamma is '3'; it must be a whole number",
        ),
        (
            lambda: theory.walltime_improvement(0.5, None, 0.1),
            "gamma is None; it must be a whole number",
        ),
        (lambda: theory.walltime_improvement(0.5, 3, "0.1"), "c is '0.1'; it must be a number"),
        (lambda: theory.optimal_gamma(0.5, math.nan), "c is nan"),
        (lambda: theory.optimal_gamma(2, 0.1), "alpha is 2"),
        (
            lambda: theory.optimal_gamma([0.5, 0.6], 0.1),
            "alpha has shape (2,); it must be one number",
        ),
        (
            lambda: theory.optimal_gamma(0.5, 0.1, verify=2.0),
            "verify is 2.0; it must be a function",
        ),
        (
            lambda: theory.verify_cost(5.0, 2),
            "verify is 5.0; it must be a function, a mapping or a list",
        ),
        (lambda: theory.verify_cost({3: "2"}, 2), "verify[3] is '2'; it must be a number"),
        (lambda: theory.operations(0.5, 2, -1), "c_hat is -1"),
        (lambda: theory.speedup(2.0, 0.1, 0.0), "verify is 0; it must be positive"),
        (lambda: theory.speedup(2.0, 0.1, 1.0, math.inf), "step is inf"),
        (lambda: theory.speedup(2.0, [0.1], 1.0), "draft has shape (1,); it must be one number"),
        (
            lambda: theory.loop_factors(5.5, 4, 0.1),
            "tokens_per_round is 5.5; it must be between 1 and gamma + 1, which is 5",
        ),
        (lambda: theory.overlap([0.5, 0.6], [1, 0]), "the target's distribution sums to 1.1"),
        (lambda: theory.overlap([0.5, 0.5], [1, 0, 0]), "shape (2,) and the draft's (3,)"),
        (lambda: theory.divergence([2.0, -1.0], [1, 0]), "the target's distribution is 2"),
        (
            lambda: theory.acceptance_rate([TARGET], [DRAFT], [0]),
            "weights must be at least 0, and not all 0",
        ),
        (
            lambda: theory.acceptance_rate([TARGET], [DRAFT], [1, 1]),
            "weights has shape (2,); it must be (1,)",
        ),
        (
            lambda: theory.acceptance_rate(np.ones((0, 1)), np.ones((0, 1))),
            "the probabilities have no position",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


# Published curves of tokens per round by draft length 1 to 8: InferenceX, golden acceptance lengths
# (golden_al_distribution), SPEED-Bench coding with 4,096 new tokens, read in November 2026.
GOLDEN = {
    "Kimi-K3 DSpark": (1.84, 2.45, 2.87, 3.22, 3.44, 3.54, 3.78, 3.88),
    "Kimi-K3 DSpark, block verification": (1.85, 2.51, 3.00, 3.36, 3.62, 3.75, 3.84, 4.00),
    "Qwen3.5-397B MTP": (1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21),
    "MiniMax-M3 EAGLE-3": (1.84, 2.52, 2.93, 3.41, 3.59, 3.57, 3.85, 4.06),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_equation_1_does_not_have_the_published_curves(name):
    """The rate that explains the first draft token explains too many of eight.

    The acceptance of a depth falls with the depth, so the best draft is shorter than that of
    equation 1.
    """
    curve = GOLDEN[name]
    rates = [theory.equal_rate(tokens, gamma) for gamma, tokens in enumerate(curve, 1)]
    for gamma, (rate, tokens) in enumerate(zip(rates, curve, strict=True), 1):
        assert theory.expected_tokens(rate, gamma) == pytest.approx(tokens)
    assert rates[0] == pytest.approx(curve[0] - 1) and rates[7] < rates[0] - 0.05
    of_equation = [theory.expected_tokens(rates[0], gamma) for gamma in range(1, 9)]
    assert of_equation[7] > 1.2 * curve[7]
    c = 0.1
    best = 1 + int(np.argmax([theory.speedup(t, g * c, 1) for g, t in enumerate(curve, 1)]))
    assert best < theory.optimal_gamma(rates[0], c, 8)[0]


@given(st.integers(1, 12), st.floats(0, 1))
@few
def test_schedules_of_a_length(gamma, share):
    """Both have the length as their mean, by enumeration; no other schedule has less variance."""
    tokens = 1 + share * gamma
    spread = []
    for rates in (
        theory.minimum_variance_rates(tokens, gamma),
        [theory.equal_rate(tokens, gamma)] * gamma,
    ):
        assert theory.expected_tokens_by_depth(rates) == pytest.approx(tokens)
        reached = np.cumprod([1.0, *rates])
        probs = reached - np.append(reached[1:], 0.0)
        lengths = 1 + np.arange(gamma + 1)
        assert probs @ lengths == pytest.approx(tokens)
        spread.append(probs @ (lengths - tokens) ** 2)
    rest = tokens % 1
    assert spread[0] == pytest.approx(rest * (1 - rest), abs=1e-9)
    assert spread[0] <= spread[1] + 1e-9


@pytest.mark.parametrize("function", [theory.equal_rate, theory.minimum_variance_rates])
def test_lengths_that_no_draft_has(function):
    for tokens in (0.5, 4.1):
        with pytest.raises(UserError, match="must be between 1 and gamma"):
            function(tokens, 3)
