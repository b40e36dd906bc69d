"""tau along the text: the intervals of positions, their sums, and the same numbers by replay."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import ModelParams, accept, drafters, testing
from specjax.bench import passes, replay, results, summaries, uncertainty
from specjax.data.recordings import Trace

OUTPUT, CONTEXT = "tau_by_output_position", "tau_by_context_position"


@pytest.mark.fast
def test_a_round_belongs_to_the_position_where_it_begins():
    # Rounds begin at 0, 31, 32, 35, 64, 100; with the prompt at 30, 61, 62, 65, 94, 130.
    fields = uncertainty.along_text([[[31, 1, 3, 29, 36, 2]]], [30])
    found = [(one["from"], one["to"], one["rounds"], one["tokens"]) for one in fields[OUTPUT]]
    assert found == [(0, 32, 2, 32), (32, 64, 2, 32), (64, 128, 2, 38)]
    found = [(one["from"], one["to"], one["rounds"], one["tokens"]) for one in fields[CONTEXT]]
    assert found == [(0, 32, 1, 31), (32, 64, 2, 4), (64, 128, 2, 65), (128, 256, 1, 2)]
    assert [one["block_efficiency"] for one in fields[OUTPUT]] == [16, 16, 19]
    # One prompt has no interval.
    assert {one["interval"] for one in fields[OUTPUT]} == {None}


texts = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=60), min_size=1, max_size=3)


@pytest.mark.fast
@given(st.lists(st.tuples(texts, st.integers(1, 200)), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_intervals_against_plain_loops(prompts):
    rounds, lengths = [each for each, _ in prompts], [length for _, length in prompts]
    fields = uncertainty.along_text(rounds, lengths)
    for key, begins in ((OUTPUT, [0] * len(lengths)), (CONTEXT, lengths)):
        counts: dict[int, list[int]] = {}
        for some, begin in zip(rounds, begins, strict=True):
            for text in some:
                at = begin
                for tokens in text:
                    edge = 0 if at < 32 else 2 ** (at.bit_length() - 1)
                    own = counts.setdefault(edge, [0, 0])
                    own[0], own[1] = own[0] + 1, own[1] + tokens
                    at += tokens
        got = {one["from"]: [one["rounds"], one["tokens"]] for one in fields[key]}
        assert got == dict(sorted(counts.items()))
        assert all(one["to"] == max(2 * one["from"], 32) for one in fields[key])


@pytest.mark.fast
def test_the_intervals_hold_the_mean_of_other_prompts():
    """95 % of the intervals of 12 prompts each; prompts differ, so rounds are not independent."""
    generator, inside = np.random.default_rng(0), 0
    for _ in range(400):
        own = generator.uniform(0.2, 0.9, 12)
        rounds = [[(1 + generator.binomial(4, rate, 9)).tolist()] for rate in own]
        first = uncertainty.along_text(rounds, [1] * 12)[OUTPUT][0]
        inside += first["interval"][0] <= 1 + 4 * 0.55 <= first["interval"][1]
    assert 0.91 < inside / 400 < 0.985


def test_bench_and_replay_have_the_same_numbers():
    """The greedy outputs of a bench, replayed: every interval of every category, with its ends."""
    target, table = testing.tabular(5), cases.table(0, 5)
    drafter = drafters.make("prompt_lookup", target, gamma=3)
    method = passes.Method("lookup", drafter, accept.load("chain"), ModelParams(table))
    prompts, categories = [[0, 1, 2], [1] * 20, [2, 2, 0, 1, 2]], ["a", "b", "a"]
    job = passes.Job(
        *(target, table, prompts, {"temperature": 0.0}, 2, 70, (), 0, 1), categories=categories
    )
    run, plain = passes.run_pass(job, method), passes.run_pass(job, None)
    measured = summaries.rows_of(job, method, [run], [plain], check=False)
    traces = [Trace(*each) for each in zip(prompts, run.outputs, categories, strict=True)]
    recorded = method._replace(params=ModelParams({}, {}))
    replayed = replay.measure_rounds(recorded, traces, batch_size=2)
    decoded = [
        results.Decoded(trace.category, counts, trace.output, emitted, len(trace.prompt))
        for trace, (counts, emitted) in zip(traces, replayed, strict=True)
    ]
    again = results.rows_of_texts(method, target, decoded, 0.0, 2)
    assert [row["category"] for row in measured] == [None, "a", "b"]
    for one, other in zip(measured, again, strict=True):
        for key in (OUTPUT, CONTEXT, "block_efficiency"):
            assert one[key] == other[key]
        assert len(one[OUTPUT]) == 3
        # A replay judges no draft token beyond the end of the recording, so its alpha differs.
        for name in ("block_efficiency", "repeated_4grams"):
            assert one["standard_errors"][name] == other["standard_errors"][name]
        for name in ("rounds", "tokens"):
            assert sum(part[name] for part in one[OUTPUT]) == one[name]


@pytest.mark.fast
def test_curves_are_of_the_methods_that_gammas_has_repeated():
    def row(method, tau, **more):
        errors = {"block_efficiency": 0.1}
        own = {"method": method, "block_efficiency": tau, "standard_errors": errors, "prompts": 4}
        return {**dict.fromkeys(results.CURVE), "rounds": 10, "temperature": 0.0, **own, **more}

    rows = [row(f"draft, gamma {g}", 1 + g / 2) for g in (2, 1, 3)]
    rows += [row(f"draft, gamma {g}", 1.5, category="a") for g in (2, 3)]
    rows += [row("lookup", 2.0), row("draft, gamma 1", 1.25, temperature=1.0)]
    greedy, part, sampled = results.curves(rows)
    assert greedy["method"] == "draft" and greedy["gammas"] == [1, 2, 3]
    assert greedy["tokens_per_round"] == [1.5, 2, 2.5] and greedy["length"] == "1.5,2,2.5"
    # The 95 % quantile of Student's t with three degrees of freedom is 3.182.
    assert greedy["intervals"][0] == pytest.approx([1.5 - 0.3182, 1.5 + 0.3182], abs=1e-4)
    assert (part["category"], part["length"]) == ("a", "")
    assert (sampled["temperature"], sampled["length"]) == (1.0, "1.25")
