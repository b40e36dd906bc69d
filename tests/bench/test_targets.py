"""How far two targets are apart: values of a loop in NumPy over tables, and wrong ones."""

from __future__ import annotations

import functools

import cases
import numpy as np
import pytest
from scipy import special

from specjax import ModelParams, accept, drafters, sampling, testing
from specjax.bench import lossless, passes, targets, uncertainty

SIZE = 3
MODEL = testing.tabular(SIZE)
TABLES = [np.asarray(cases.table(seed)) for seed in (0, 5)]
PROMPTS = [[0, 1], [2], [1, 1, 0]]


def job(number: int, temperature: float) -> passes.Job:
    settings = {"temperature": temperature}
    return passes.Job(MODEL, cases.table((0, 5)[number]), PROMPTS, settings, 2, 9, (), 5, 1)


@functools.cache
def texts(temperature: float):
    return tuple(passes.run_pass(job(number, temperature), None) for number in (0, 1))


def expected(temperature: float) -> dict:
    """Both means by definition, at each token of the first target's texts."""
    apart, same = [], []
    for prompt, output in zip(PROMPTS, texts(temperature)[0].outputs, strict=True):
        whole = [SIZE, *prompt, *output]
        for place in range(len(prompt), len(whole) - 1):
            logits = [table[whole[place - 1], whole[place]] for table in TABLES]
            p, q = (special.softmax(each / (temperature or 1.0)) for each in logits)
            apart.append(abs(p - q).sum() / 2)
            same.append(logits[0].argmax() == logits[1].argmax())
    return {"total_variation": np.mean(apart), "argmax_agreement": np.mean(same)}


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_distance(temperature):
    own, right = texts(temperature), expected(temperature)
    one = targets.between(job(0, temperature), job(1, temperature), own)
    assert {key: one[key] for key in right} == pytest.approx(right, abs=1e-6)
    assert 0 < right["argmax_agreement"] < 1 and right["total_variation"] > 0.1
    assert one["tokens"] == 27 and one["texts"] == 3
    assert one["texts_equal"] == sum(
        a == b for a, b in zip(*(each.outputs for each in own), strict=True)
    )
    for name in right:
        low, high = one[f"{name}_interval"]
        assert low < one[name] < high


def test_a_target_is_not_apart_from_itself():
    own = texts(0.6)[0]
    one = targets.between(job(0, 0.6), job(0, 0.6), (own, own))
    assert one["total_variation"] == pytest.approx(0, abs=1e-6)
    assert one["argmax_agreement"] == 1 and one["texts_equal"] == one["texts"] == 3


def lagging(model, params, context):
    """The other target's probabilities of the token before."""
    before = np.maximum(np.arange(context.tokens.shape[1]) - 1, 0)
    return right_probs(model, params, context)[:, before]


right_probs = targets._small_model.probs
MUTANTS = {
    "the first target twice": (
        targets._small_model,
        "probs",
        lambda model, params, context: right_probs(
            model, ModelParams(params.target, params.target), context
        ),
    ),
    "a place later": (targets._small_model, "probs", lagging),
    "texts of the other target": (
        lossless,
        "compare",
        lambda scored: COMPARE(scored._replace(outputs=texts(0.6)[1].outputs)),
    ),
    "without the settings": (
        sampling,
        "to_probs",
        lambda logits, how: TO_PROBS(logits, how.replace(temperature=0 * how.temperature + 1)),
    ),
    "the overlap": (
        targets,
        "_mean",
        lambda name, values, outputs: MEAN(name, 1 - values, outputs),
    ),
}
COMPARE, TO_PROBS, MEAN = lossless.compare, sampling.to_probs, targets._mean


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(name, monkeypatch):
    right, own = expected(0.6), texts(0.6)
    monkeypatch.setattr(*MUTANTS[name])
    lossless._compare.clear_cache()
    try:
        one = targets.between(job(0, 0.6), job(1, 0.6), own)
    finally:
        lossless._compare.clear_cache()
    assert any(abs(one[key] - right[key]) > 1e-3 for key in right)


def test_intervals_are_over_prompts():
    """Tokens of one prompt depend on each other: three prompts are three samples."""
    values, outputs = np.array([0.6, 0.6, 0.6, 0.5, 0.5, 0.5]), [[0] * 3, [0] * 2, [0]]
    found = targets._mean("x", values, outputs)
    error = uncertainty.ratio_error([1.8, 1.0, 0.5], [3, 2, 1])
    assert found["x"] == pytest.approx(3.3 / 6)
    assert found["x_interval"] == pytest.approx(uncertainty.around(found["x"], error, 3))
    # A share is at most 1 and at least 0, and so are the ends.
    far = targets._mean("x", np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.5]), outputs)
    assert far["x_interval"] == [0.0, 1.0]
    assert targets._mean("x", values[:3], outputs[:1])["x_interval"] is None
    assert targets._mean("x", values[:0], [[]]) == {"x": None, "x_interval": None}


def test_ratio_of_tokens_per_round():
    drafter = drafters.make("prompt_lookup", MODEL, gamma=2, max_ngram=1)
    runs = []
    for number in (0, 1):
        one = job(number, 0.6)
        params = ModelParams(one.params)
        runs.append(passes.run_pass(one, passes.Method("x", drafter, accept.load("chain"), params)))
    taus = [run.tokens / sum(each.rounds for each in run.counts) for run in runs]
    found = targets.tau_ratio(runs[:1], runs[1:])
    assert found["tau_ratio"] == pytest.approx(taus[1] / taus[0])
    low, high = found["tau_ratio_interval"]
    assert low < found["tau_ratio"] < high
    same = targets.tau_ratio(runs[:1], runs[:1])
    assert [same["tau_ratio"], *same["tau_ratio_interval"]] == pytest.approx([1.0] * 3)
