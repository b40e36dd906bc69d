"""The share of repeated 4-grams, and prompts of random tokens."""

from __future__ import annotations

import cases
import numpy as np
import pytest

from specjax import ModelParams, accept, drafters, testing
from specjax.bench import measuring, metrics, passes, summaries
from specjax.report import terminal

pytestmark = pytest.mark.fast


def test_repeats_are_counted_within_each_output():
    assert metrics.repeats([1, 2, 3]) == (0, 0)
    assert metrics.repeats([1, 2, 3, 4]) == (0, 1)
    assert metrics.repeats([1, 2, 3, 4, 1, 2, 3, 4]) == (1, 5)
    assert metrics.repeats([7] * 103) == (99, 100)
    # The same output twice is no repetition: two prompts may have one answer.
    assert metrics.repeated_4grams([[1, 2, 3, 4, 5]] * 2) == 0
    assert metrics.repeated_4grams([[1, 2, 3, 4], [7] * 6, [1]]) == 2 / 4
    assert metrics.repeated_4grams([[1, 2]]) is metrics.repeated_4grams([]) is None


@pytest.mark.parametrize("vocab_size", [512, 50_257])
def test_random_ids_are_noticed_and_skewed_ids_are_not(vocab_size):
    rng = np.random.default_rng(0)
    for low, high in ((0, vocab_size), (vocab_size // 30, vocab_size)):
        for count in (1, 40):
            prompts = rng.integers(low, high, (count, 256)).tolist()
            assert metrics.random_prompts(prompts, vocab_size) is True
    # Zipf's law, and half of the vocabulary.
    ranks = 1 / np.arange(1, vocab_size + 1)
    words = rng.choice(vocab_size, (4, 256), p=ranks / ranks.sum()).tolist()
    half = rng.integers(0, vocab_size // 2, (4, 256)).tolist()
    for prompts in (words, half, [[5] * 500]):
        assert metrics.random_prompts(prompts, vocab_size) is False
    assert metrics.random_prompts([[3, 1], [4] * 100], vocab_size) is None


def test_a_rule_that_any_random_sample_passes():
    """False alarms are impossible for a point mass; misses are at most one in 1000."""
    rng = np.random.default_rng(1)
    samples = rng.integers(0, 4096, (2000, metrics.LEAST))
    noticed = [metrics.random_prompts([sample], 4096) for sample in samples]
    assert noticed.count(True) >= 0.998 * len(noticed)


def test_rows_have_both_and_the_table_warns():
    size = 5
    target, params = testing.tabular(size), ModelParams(cases.table(0, size))
    method = passes.Method(
        "lookup", drafters.make("prompt_lookup", target), accept.load("chain"), params
    )
    prompts = [np.random.default_rng(n).integers(0, size, 80).tolist() for n in range(2)]
    job = passes.Job(
        target,
        params.target,
        prompts,
        {"temperature": 0.0},
        1,
        24,
        (),
        0,
        2,
        categories=["a", "b"],
    )
    plain, one = passes.run_pass(job, None), passes.run_pass(job, method)
    measured = measuring.Measured([plain] * 2, [[one] * 2])
    whole, *parts = summaries.measured_rows(job, [method], measured, check=False)
    for row, outputs in zip(
        (whole, *parts), (one.outputs, *([x] for x in one.outputs)), strict=True
    ):
        assert row["repeated_4grams"] == metrics.repeated_4grams(outputs)
        assert row["random_prompts"] is True
    assert whole["repeated_4grams"] > 0.3  # a greedy table of five tokens loops
    [note] = [note for note in terminal.notes([whole]) if note.startswith("random prompts")]
    assert "drawn at random" in note
    assert not any("random" in note for note in terminal.notes([whole | {"random_prompts": None}]))
