"""Sequential temperature scaling: it finds known temperatures, and lowers the error."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.errors import UserError
from specjax.theory import calibration

pytestmark = pytest.mark.fast


def rounds(count, heats, seed=0):
    """Confidences that are too sure by these temperatures, and how much was accepted."""
    random = np.random.default_rng(seed)
    true = random.uniform(0.05, 0.95, (count, len(heats)))
    logits = np.log(true / (1 - true)) * np.asarray(heats)
    accepted = (random.random(true.shape) < true).cumprod(1).sum(1)
    return 1 / (1 + np.exp(-logits)), accepted


def test_known_temperatures_are_found():
    heats = [2.0, 1.0, 0.5]
    found = calibration.fit(*rounds(60_000, heats))
    np.testing.assert_allclose(found, heats, rtol=0.12)


def test_the_error_of_the_product_falls():
    """Also on rounds that it was not fitted to, and where drafts end early."""
    confidences, accepted = rounds(4000, [3.0] * 4)
    confidences[::3, 2:] = -1
    heats = calibration.fit(confidences, np.minimum(accepted, np.where(np.arange(4000) % 3, 4, 2)))
    fresh, happened = rounds(4000, [3.0] * 4, seed=1)
    for depth in range(4):
        before = calibration.error(fresh[:, : depth + 1].prod(1), happened > depth)
        after = calibration.scaled(fresh, heats)[:, : depth + 1].prod(1)
        assert calibration.error(after, happened > depth) < before / 2


def test_the_error_is_that_of_the_bins():
    predicted = np.repeat([0.1, 0.9], 50)
    happened = np.concatenate([np.arange(50) < 5, np.arange(50) < 30])
    # Equal predictions share a bin, in any order: 0.1 is right, and 0.9 happens at a rate of 0.6.
    assert calibration.error(predicted, happened) == pytest.approx(0.15)
    order = np.random.default_rng(0).permutation(100)
    assert calibration.error(predicted[order], happened[order]) == pytest.approx(0.15)
    assert calibration.error([0.25] * 4, [1, 0, 0, 0]) == pytest.approx(0)
    # Different ones: ten bins of two, with a gap of 1/20 and of 1/4 in turns.
    places = np.arange(20)
    rates = np.where(places % 4 < 2, 0.45, 0.25) + 1e-6 * places
    assert calibration.error(np.sort(rates), places % 2) == pytest.approx(0.15, abs=1e-4)
    assert calibration.error([], []) == 0


def test_a_depth_that_was_not_reached_is_left_as_it_is():
    heats = calibration.fit([[0.9, -1], [0.9, -1]], [1, 0])
    assert heats[1] == 1


def test_errors():
    with pytest.raises(UserError, match="give \\[rounds, depths\\] and \\[rounds\\]"):
        calibration.fit([[0.5]], [1, 2])
    with pytest.raises(UserError, match="a confidence is above 1"):
        calibration.fit([[1.5]], [1])
