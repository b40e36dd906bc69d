"""Forecasts of tokens per round: closed forms, and a comparison with decoding the same prompts."""

from __future__ import annotations

import cases
import numpy as np
import pytest

from specjax import drafters, sampling, testing
from specjax.train import examine
from specjax.types import ModelParams

fast = pytest.mark.fast
PROMPTS = [[0], [1, 2, 3], [4, 4], [2, 1, 0, 3]] * 32
STARTS = [len(prompt) for prompt in PROMPTS]
NEW = 24
# One target and one drafter for all tests: each compiles once.
TARGET, TABLE = testing.tabular(5), cases.table(0, 5)
DRAFT = TABLE + 0.7 * cases.table(1, 5)
DRAFTER = drafters.make(
    "draft_model", TARGET, model=testing.tabular(5, "draft"), params=DRAFT, gamma=3
)


@fast
@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 3), (0.6, 1), (0.8, 4), (1.0, 4)])
def test_constant_acceptance_has_a_closed_form(alpha, gamma):
    new = 4000
    kept = np.full((1, new + 1, gamma), alpha)
    result = examine.forecast(kept, [1], [1 + new])
    expected = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert result.tau == pytest.approx(expected, rel=2e-3)
    assert result.alpha == pytest.approx([alpha] * (1 if alpha == 0 else gamma))


@fast
def test_expected_rounds_by_enumeration():
    """Every outcome of a small text, one by one."""
    rng = np.random.default_rng(0)
    kept, start, length = rng.random((1, 6, 2)), 2, 6

    def rounds(pending):  # expected rounds from here to the end
        left = length - 1 - pending
        if left <= 0:
            return 0.0
        total, reach = 1.0, 1.0
        for depth in range(min(2, left)):
            total += reach * (1 - kept[0, pending, depth]) * rounds(pending + depth + 1)
            reach *= kept[0, pending, depth]
        return total + reach * rounds(pending + min(2, left) + 1)

    result = examine.forecast(kept, [start], [length])
    assert result.tau == pytest.approx((length - start) / rounds(start - 1))


def _measure(**keys):
    settings = {"new_tokens": NEW, "temperatures": (0.0, 1.0)} | keys
    return examine.examiner(TARGET, DRAFTER, TABLE, PROMPTS, **settings)(DRAFT)


@pytest.fixture(scope="module")
def measured():
    return _measure()


def _check_agreement(values):
    assert values["tau_t0"] == values["decoded_tau_t0"] > 1.5
    assert values["tau_t1"] == pytest.approx(values["decoded_tau_t1"], rel=0.05)
    assert 1.2 < values["tau_t1"] < 4 and 0 < values["alpha_t1_depth3"] < 1


def test_the_forecast_agrees_with_decoding(measured):
    _check_agreement(measured)


def test_the_forecast_agrees_with_decoding_up_to_an_end_of_sequence(measured):
    values = _measure(eos_id=(3,))
    _check_agreement(values)
    assert values["tau_t1"] != measured["tau_t1"]


def test_a_wrong_forecast_does_not_agree_with_decoding(measured):
    """The mutant: acceptance read one position too late."""
    pair = ModelParams(TABLE, DRAFT)
    text = examine.write(TARGET, pair, PROMPTS, NEW, 0.0)
    settings = sampling.make_sampling(len(PROMPTS), 0.0)
    kept = np.asarray(DRAFTER.training.foresee(pair, text.batch, settings), np.float64)
    right = examine.forecast(kept, STARTS, text.lengths)
    assert right.tau == measured["decoded_tau_t0"]
    late = examine.forecast(np.roll(kept, 1, axis=1), STARTS, text.lengths)
    assert late.tau != measured["decoded_tau_t0"]


def test_a_target_that_is_trained_too():
    draft = cases.table(1, 5)
    drafter = drafters.make(
        "draft_model", TARGET, model=testing.tabular(5, "draft"), params=draft, gamma=2
    )
    measure = examine.examiner(
        TARGET, drafter, None, PROMPTS[:8], new_tokens=8, temperatures=(0.0,), moving=True
    )
    different, same = (measure({"target": target, "draft": draft}) for target in (TABLE, draft))
    assert same["tau_t0"] == pytest.approx(8 / 3) and different["tau_t0"] < 2


def test_accuracies():
    pair = ModelParams(TABLE, DRAFT)
    texts = [examine.write(TARGET, pair, PROMPTS, NEW, t) for t in (0.0, 1.0)]
    table = np.array(examine.accuracy(DRAFTER, pair, texts, STARTS, 4))
    assert table.shape == (3, 4) and (table.sum(1) <= 1 + 1e-9).all()
    # A draft model reads the text itself: its depths differ only by chance and by the last tokens.
    assert np.abs(table - table[0]).max() < 0.1 and table[0, 0] > table[0, 1]
    whole = np.array(examine.accuracy(DRAFTER, pair, texts, STARTS, 5))
    assert whole.sum(1) == pytest.approx([1, 1, 1])
