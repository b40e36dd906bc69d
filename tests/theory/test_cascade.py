"""Cascades: the closed forms against simulations, and against chains where they coincide."""

from __future__ import annotations

import numpy as np
import pytest

from specjax import theory
from specjax.errors import UserError
from specjax.theory import cascade

pytestmark = pytest.mark.fast


def run_lengths(generator, chance, limit, samples):
    """The number of successes before the first failure, of at most ``limit`` trials."""
    return np.cumprod(generator.random((samples, limit)) < chance, axis=1).sum(1)


@pytest.mark.parametrize(
    ("alpha", "inner", "n", "k"),
    [(0.8, 0.6, 2, 3), (0.5, 0.9, 3, 1), (0.9, 0.3, 1, 5), (1, 0.7, 2, 2)],
)
def test_vertical_cascade(alpha, inner, n, k):
    generator, samples = np.random.default_rng(1), 400_000
    drafted = sum(run_lengths(generator, inner, k, samples) + 1 for _ in range(n))
    emitted = np.minimum(run_lengths(generator, alpha, n * (k + 1), samples), drafted) + 1
    cost = 1 + n * 0.2 + n * k * 0.03
    gain = cascade.vertical_improvement(alpha, inner, n, k, 0.2, 0.03)
    assert gain == pytest.approx(emitted.mean() / cost, rel=0.005)


def test_vertical_cascade_near_alpha_1():
    limit = cascade.vertical_improvement(1, 0.7, 2, 3, 0.1, 0.01)
    for near in (1 - 1e-15, 1 - 1e-12, 1 - 1e-9):
        gain = cascade.vertical_improvement(near, 0.7, 2, 3, 0.1, 0.01)
        assert gain == pytest.approx(limit, rel=1e-7)
    # The form that the paper prints.
    for alpha in (0.0, 0.3, 0.9):
        phi = cascade.generating_function(alpha, 0.7, 3)
        printed = (1 - alpha * phi**2) / (1 - alpha) / (1 + 2 * 0.1 + 6 * 0.01)
        assert cascade.vertical_improvement(alpha, 0.7, 2, 3, 0.1, 0.01) == pytest.approx(printed)
    assert cascade.vertical_improvement(0.5, 0.7, 0, 3, 0.1, 0.01) == 1


@pytest.mark.parametrize("x", [0, 0.3, 0.9, 1])
def test_generating_function(x):
    tokens = run_lengths(np.random.default_rng(2), 0.7, 4, 40_000) + 1
    value = cascade.generating_function(x, 0.7, 4)
    assert value == pytest.approx((float(x) ** tokens).mean(), abs=0.005)


def test_cascades_of_one_drafter_are_chains():
    rise = cascade.generating_function(1, 0.7, 4) - cascade.generating_function(1 - 1e-6, 0.7, 4)
    assert rise / 1e-6 == pytest.approx(theory.expected_tokens(0.7, 4), rel=1e-4)
    chain = theory.walltime_improvement(0.8, 5, 0.1)
    assert cascade.vertical_improvement(0.8, 0.3, 5, 0, 0.1, 0.01) == pytest.approx(chain)
    assert cascade.horizontal_improvement([0.8], [5], [0.1]) == pytest.approx(chain)


def test_horizontal_cascade():
    alphas, lengths, costs = (0.8, 0.6), (3, 4), (0.1, 0.01)
    acceptance = np.repeat(alphas, lengths)
    accepted = np.random.default_rng(3).random((400_000, 7)) < acceptance
    emitted = np.cumprod(accepted, axis=1).sum(1) + 1
    gain = cascade.horizontal_improvement(alphas, lengths, costs)
    assert gain == pytest.approx(emitted.mean() / 1.34, rel=0.005)
    printed = (sum(0.8**i for i in range(4)) + 0.8**3 * sum(0.6**i for i in range(1, 5))) / 1.34
    assert gain == pytest.approx(printed)
    with pytest.raises(UserError, match=r"have \[2, 1, 2\] entries"):
        cascade.horizontal_improvement(alphas, [1], costs)


def test_escalated_improvement_is_that_of_drawn_rounds():
    """Rounds are drawn one by one: who drafts, how many tokens are accepted, what it costs."""
    shares, alphas, lengths, costs = (0.3, 0.5), (0.9, 0.7), (8, 3), (0.01, 0.2)
    passes = {1: 1.0, 4: 1.3, 9: 1.9}
    generator, tokens, time = np.random.default_rng(0), 0, 0.0
    for kind in generator.choice(3, 100_000, p=[*shares, 0.2]):
        length, alpha, cost = ((*lengths, 0)[kind], (*alphas, 0)[kind], (*costs, 0)[kind])
        accepted = 0
        while accepted < length and generator.random() < alpha:
            accepted += 1
        tokens, time = tokens + accepted + 1, time + passes[length + 1] + length * cost
    gain = cascade.escalated_improvement(shares, alphas, lengths, costs, passes)
    assert gain == pytest.approx(tokens / time, rel=0.01)
    # One drafter in all rounds, and one in none.
    alone = cascade.escalated_improvement([1], [0.7], [3], [0.2], passes)
    assert alone == pytest.approx(theory.walltime_improvement(0.7, 3, 0.2, passes))
    assert cascade.escalated_improvement([0, 0], alphas, lengths, costs) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cascade.vertical_improvement(0.5, 0.5, -1, 2, 0.1, 0.1), "inner_rounds is -1"),
        (
            lambda: cascade.vertical_improvement(0.5, [0.5], 1, 2, 0.1, 0.1),
            "inner_alpha has shape (1,)",
        ),
        (lambda: cascade.horizontal_improvement([0.5], [2], [-1]), "a cost is -1"),
        (
            lambda: cascade.escalated_improvement([0.7, 0.4], [0.5] * 2, [2, 2], [0, 0]),
            "the shares add up to 1.1; they must be shares of all rounds",
        ),
        (lambda: cascade.escalated_improvement([0.7], [0.5, 0.5], [2, 2], [0, 0]), "[2, 2, 2, 1]"),
        (
            lambda: cascade.horizontal_improvement(0.5, 2, 0.1),
            "an argument is no list",
        ),
        (lambda: cascade.generating_function([0.5], 0.5, 2), "x has shape (1,)"),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)
