"""The cost of verification is that of the widths that the rounds of a pass verified."""

from __future__ import annotations

import jax
import pytest

from specjax import accept, drafters, testing
from specjax.bench import measuring, passes, timing
from specjax.bench.passes import Job, Method
from specjax.types import ModelParams

MODEL, TABLE = testing.tabular(6), testing.random_table(0, 6, 3.0)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 0]]
JOB = Job(MODEL, TABLE, PROMPTS, {"temperature": 0.0}, 1, 12, (), 0, 1)


def method(**keys):
    drafter = drafters.make("prompt_lookup", MODEL, gamma=5, **keys)
    return Method("lookup", drafter, accept.load("chain"), ModelParams(TABLE, {}))


def test_a_pass_counts_its_widths_and_pays_for_each():
    one = passes.run_pass(JOB, method())
    assert sum(one.widths.values()) == one.loops and len(one.widths) > 1
    assert passes.from_json(passes.to_json(one)).widths == one.widths
    parts = measuring.clocks(JOB, method())
    assert list(parts) == ["draft", "verify 1", "verify 6"]
    seconds = measuring.costs_of_pass(JOB, method(), parts, one)
    assert set(seconds) == {"draft", "verify"} and seconds["verify"] > 0
    assert list(measuring.clocks(JOB, None)) == ["step"] and passes.run_pass(JOB, None).widths == {}


def test_methods_share_the_passes_of_the_target():
    """One program for each width, whatever drafts; the buffers of plain decoding are smaller."""
    target = JOB.target._replace(name="shared")
    job = JOB._replace(target=target)
    other = drafters.make("draft_model", target, model=MODEL, params=TABLE, gamma=5)
    own = drafters.make("prompt_lookup", target, gamma=5)
    pairs = [(own, {}), (other, other.init_params(jax.random.key(0)))]
    methods = [
        Method(drafter.name, drafter, accept.load("chain"), ModelParams(TABLE, params))
        for drafter, params in pairs
    ]
    before = timing._pass_loop._cache_size()
    measuring._compile_clocks(job, methods)
    assert timing._pass_loop._cache_size() - before == len({1, 6}) + 1


def test_the_mean_over_the_rounds(monkeypatch):
    timed = {"draft": 1.0, "verify 1": 2.0, "verify 6": 4.0}
    monkeypatch.setattr(
        measuring, "sample", lambda job, method, parts: {k: timed[k] for k in parts}
    )
    one = passes.run_pass(JOB, None)._replace(widths={"1": 3, "6": 1})
    parts = dict.fromkeys(["draft", "verify 1", "verify 2", "verify 6"])
    assert measuring.costs_of_pass(JOB, method(), parts, one) == {
        "draft": 1.0,
        "verify": pytest.approx(2.5),
    }
    # A pass that an older version stored has no widths.
    none = measuring.costs_of_pass(JOB, None, {}, one._replace(widths={}))
    assert none == {}
