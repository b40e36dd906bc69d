"""The rows of results.json from passes: which passes their counts come from."""

from __future__ import annotations

import statistics

import cases
import jax
import numpy as np
import pytest

from specjax import ModelParams, accept, drafters, testing
from specjax.bench import lossless, measuring, metrics, passes, proofs, summaries
from specjax.bench.measuring import Measured
from specjax.errors import UserError
from specjax.report import columns
from specjax.theory import devices

TARGET, DRAFT = testing.tabular(3), testing.tabular(3, "draft")
PROMPTS, CATEGORIES = [[0, 1], [2], [1, 1, 0]], ["a", "b", "a"]


def rows(name: str, temperature: float, rule: str = "", **keys):
    """The row of a method, those of its categories, and its passes; checked if it has a rule."""
    drafter = drafters.make(name, TARGET, **keys)
    params = ModelParams(cases.table(0), drafter.init_params(None))
    method = passes.Method(name, drafter, accept.load(rule or "chain"), params)
    settings = {"temperature": temperature}
    job = passes.Job(
        TARGET, cases.table(0), PROMPTS, settings, 2, 12, (), 5, 3, categories=CATEGORIES
    )
    seeds = [job._replace(seed=job.seed + repeat) for repeat in range(job.repeats)]
    runs = [passes.run_pass(each, method) for each in seeds]
    plain = [passes.run_pass(each, None) for each in seeds]
    measured = Measured(plain, [runs])
    whole, *parts = summaries.measured_rows(job, [method], measured, check=bool(rule))
    return whole, parts, runs


def check(whole: dict, parts: list[dict], runs: list[passes.Pass]) -> None:
    """The row has the counts of these passes, and its categories add up to it."""
    counts = metrics.total([each for run in runs for each in run.counts])
    assert {key: whole[key] for key in metrics.summary(counts)} == metrics.summary(counts)
    assert whole["prompts"] == 3 and [part["prompts"] for part in parts] == [2, 1]
    for key in ("tokens", "rounds"):
        assert sum(part[key] for part in parts) == whole[key]


@pytest.mark.fast
def test_two_methods_of_one_name_are_refused():
    drafter = drafters.make("prompt_lookup", TARGET)
    params = ModelParams(cases.table(0))
    method = passes.Method("same", drafter, accept.load("chain"), params)
    job = passes.Job(TARGET, cases.table(0), PROMPTS, {"temperature": 0.0}, 1, 4, (), 0, 1)
    for call in (measuring.warm, lambda job, some: measuring.measure(job[0], some)):
        with pytest.raises(UserError, match="two methods are called 'same'"):
            call([job], [method, method])


MODEL = {"model": DRAFT, "params": cases.table(1), "gamma": 2}


def test_sampled_rows_have_the_counts_of_all_passes():
    whole, parts, runs = rows("draft_model", 1.0, **MODEL)
    assert len({run.outputs[0][0] for run in runs} | {str(run.outputs) for run in runs}) > 2
    assert whole["tokens"] == 3 * 3 * 12
    check(whole, parts, runs)


def test_greedy_rows_have_the_counts_of_one_pass():
    whole, parts, runs = rows("draft_model", 0.0, **MODEL)
    assert whole["tokens"] == 3 * 12
    check(whole, parts, runs[:1])


def test_share_of_the_bandwidth(monkeypatch):
    t4 = devices.named("T4")
    monkeypatch.setattr(devices, "of_kind", lambda kind: t4 if kind == "cpu" else None)
    plain = []
    own = passes.run_pass
    monkeypatch.setattr(passes, "run_pass", lambda *a: plain.append(own(*a)) or plain[-1])
    whole, _, _ = rows("prompt_lookup", 0.0, gamma=2)
    # The table, and a cache of 2 rows: 8 tokens (2 of a prompt, half of the new ones), a length.
    assert whole["step_bytes"] == cases.table(0).nbytes + 2 * (8 + 1) * 4
    step = statistics.median(one.loop / one.loops for one in plain[3:])
    assert whole["bandwidth_share"] == pytest.approx(whole["step_bytes"] / step / t4.bandwidth)


@pytest.mark.fast
def test_greedy_passes_that_differ_are_all_counted():
    inner = {"inner": {"name": "prompt_lookup", "gamma": 2}}
    whole, parts, runs = rows("controlled", 0.0, drafters=inner, rate=0.5)
    assert runs[0].outputs == runs[1].outputs and runs[0].emitted != runs[1].emitted
    check(whole, parts, runs)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("rule", "temperature", "found", "passed"),
    [
        ("chain", 1.0, True, True),
        ("lenient", 1.0, True, None),
        ("lenient", 1.0, False, False),
        ("lenient", 0.0, True, None),
        ("lenient", 0.0, False, False),
    ],
)
def test_no_text_shows_that_a_lossy_rule_is_lossless(rule, temperature, found, passed, monkeypatch):
    """Greedy texts can agree by chance. A text that differs is a fact, and so is another law."""
    result = proofs.Finding("law", found, "900 tokens, 0 impossible, p = 0.5")
    for name in ("law_check", "greedy_identity"):
        monkeypatch.setattr(lossless, name, lambda *_, **__: result)
    whole, *_ = rows("draft_model", temperature, rule, **MODEL)
    assert whole["lossless"]["passed"] is passed
    assert whole["lossless"]["detail"].endswith("lenient is lossy") is (passed is None)


def lossy_row(drafter, temperature, rule="lenient", **keys):
    """The row of a lossy rule, where the target has (.5, .3, .2) after every text."""
    table = np.broadcast_to(np.log([0.5, 0.3, 0.2]).astype(np.float32), (4, 3, 3))
    params = ModelParams(jax.numpy.asarray(table), drafter.init_params(None))
    method = passes.Method("x", drafter, accept.load(rule, **keys), params)
    job = passes.Job(TARGET, params.target, PROMPTS, {"temperature": temperature}, 2, 8, (), 5, 1)
    runs, plain = passes.run_pass(job, method), passes.run_pass(job, None)
    [row] = summaries.measured_rows(job, [method], Measured([plain], [[runs]]))
    return row


def draft_of(probs, **keys):
    table = np.broadcast_to(np.log(probs).astype(np.float32), (4, 3, 3))
    return drafters.make(
        "draft_model", TARGET, model=DRAFT, params=jax.numpy.asarray(table), **keys
    )


def test_the_distance_of_a_lossy_rule():
    """By hand. The draft has (.2, .7, .1); the emitted token has (3, 6.6, 1.4) / 11."""
    drafter, law = draft_of([0.2, 0.7, 0.1], gamma=2), np.array([3, 6.6, 1.4]) / 11
    row = lossy_row(drafter, 1.0, lenience=0.5)
    assert row["total_variation"] == pytest.approx(0.3, abs=1e-6)
    kl = float((law * np.log(law / [0.5, 0.3, 0.2])).sum())
    assert row["kl_divergence"] == pytest.approx(kl, abs=1e-6) and row["texts_changed"] is None
    assert columns.joined(row, columns.BY_KEY["total_variation"], {"total_variation": " "}) == (
        f"0.300 KL {kl:.3g}"
    )
    exact = lossy_row(drafter, 1.0, lenience=1.0)
    assert exact["total_variation"] == pytest.approx(0, abs=1e-6)
    assert exact["kl_divergence"] == pytest.approx(0, abs=1e-6)
    # Class L1: no distance is computed.
    lossless = lossy_row(drafter, 1.0, rule="chain")
    assert lossless["total_variation"] is lossless["kl_divergence"] is None


def test_the_distance_at_temperature_0_is_the_share_of_changed_texts():
    drafter = draft_of([0.2, 0.7, 0.1], gamma=2)
    # The draft's best token has .3 / .5 of the target's best: it is accepted in every text.
    row = lossy_row(drafter, 0.0, lenience=0.5)
    assert row["texts_changed"] == 1 and row["total_variation"] is None
    assert row["lossless"]["detail"].startswith("0/3")
    assert lossy_row(drafter, 0.0, lenience=0.7)["texts_changed"] == 0
    assert lossy_row(drafter, 0.0, rule="chain")["texts_changed"] is None


def test_the_distance_is_of_tested_places_only():
    """A lookup gives its tokens, and all pass: at a tested place the law is one-hot."""
    drafter = drafters.make("prompt_lookup", TARGET, gamma=2, max_ngram=1)
    row = lossy_row(drafter, 1.0, rule="tolerance", top=3)
    # 1 - p of the token; it is 0 at places without a test.
    assert 0.5 <= row["total_variation"] <= 0.8
    assert -np.log(0.5) - 1e-5 <= row["kl_divergence"] <= -np.log(0.2) + 1e-5
