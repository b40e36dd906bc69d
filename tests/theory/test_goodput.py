"""Goodput: draft lengths under load, and the fitted latency."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specjax.errors import UserError
from specjax.theory import goodput

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("batch", "relative", "best"),
    [
        (1, [1, 1.62, 1.99, 2.20, 2.31, 2.35], 5),
        (64, [1, 1.62, 1.37, 1.18, 1.03, 0.90], 1),
        (256, [1, 0.84, 0.72, 0.62, 0.54, 0.48], 0),
    ],
)
def test_goodput_under_load(batch, relative, best):
    """goodput(k) / goodput(0) at alpha .7 for three loads, to two digits.

    A target pass takes at least 1 and is bound by arithmetic above 128 tokens; drafting a token
    takes .05. The time of a round is max(1, B (k + 1) / 128) + .05 k.
    """

    def time(k):
        return max(1.0, batch * (k + 1) / 128) + 0.05 * k

    alphas = np.full(batch, 0.7)
    values = [goodput.goodput(alphas, k, time(k)) for k in range(6)]
    assert [round(value / values[0], 2) for value in values] == relative
    assert goodput.best_length(alphas, time, 5) == (best, values[best])


def test_goodput_by_depth():
    table = [[0.9, 0.5], [0.2, 1.0]]
    np.testing.assert_allclose(goodput.tokens(table, 2), [1 + 0.9 + 0.45, 1.4])
    np.testing.assert_allclose(goodput.tokens([0.5, 0], 2), [1.75, 1])
    np.testing.assert_allclose(goodput.tokens(0.5, 2), [1.75])
    # No deeper than the table.
    assert goodput.best_length(table, lambda k: 1.0, 9)[0] == 2
    with pytest.raises(UserError, match=r"alphas has shape \(2, 2\) and k is 3"):
        goodput.tokens(table, 3)


def test_latency_is_fitted():
    true = goodput.Latency(2e-6, 5e-5, 0.01)
    sizes = list(itertools.product((0, 1e4, 1e6), (1, 64, 512)))
    noise = np.random.default_rng(0).normal(1, 0.01, len(sizes))
    assert goodput.fit((*size, true(*size)) for size in sizes) == pytest.approx(true)
    rough = goodput.fit((*size, true(*size) * n) for size, n in zip(sizes, noise, strict=True))
    assert rough(1e5, 100) == pytest.approx(true(1e5, 100), rel=0.05)
    with pytest.raises(UserError, match="profiles do not determine the coefficients"):
        goodput.fit([(10 * n, n, 1.0 + n) for n in range(1, 6)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: goodput.goodput([0.5], 2, 0), "time is 0; it must be positive"),
        (lambda: goodput.tokens([0.5, 1.5], 2), "alphas is 1.5"),
        (lambda: goodput.tokens([], 2), "alphas is empty"),
        (lambda: goodput.fit([(1, 2)]), "profiles has shape (1, 2); its rows must be (context"),
        (lambda: goodput.fit(5), "profiles is 5; give rows of"),
        (lambda: goodput.best_length([], lambda k: 1.0, 3), "alphas is empty"),
        (
            lambda: goodput.best_length([[0.5], [0.5, 0.6]], lambda k: 1.0, 3),
            "alphas is [[0.5], [0.5, 0.6]]",
        ),
        (lambda: goodput.best_length([0.5], 1.0, 3), "time is 1.0; it must be a function"),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)
