"""Traces against the loop and the models themselves; the overlap against sums by hand; clocks that clock."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, drafters, sampling, testing
from specjax.bench import metrics, passes, timing, token_traces
from specjax.bench.overlap import overlap
from specjax.models import lm
from specjax.report import files, terminal
from specjax.testing import cases
from specjax.topology.shapes import Topology
from specjax.types import ModelParams

V, NEW = 5, 12
TARGET, DRAFT, _ = cases.models(V)
TABLES = {"target": cases.table(0, V), "draft": cases.table(1, V)}
SETTINGS = {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0}


def spell(ids):
    return "".join("abcde"[i] for i in ids)


def method(name):
    keys = {"model": DRAFT, "params": TABLES["draft"]}
    drafter, rule = {
        "chain": lambda: (drafters.make("draft_model", TARGET, gamma=3, **keys), "chain"),
        "tree": lambda: (drafters.make("draft_tree", TARGET, tree="2x2x1", **keys), "recursive"),
        "twins": lambda: (
            drafters.make(
                "draft_tree", TARGET, tree=Topology((-1, -1, -1, 1, 2, 4)), siblings="iid", **keys
            ),
            "recursive",
        ),
        "lookup": lambda: (drafters.make("prompt_lookup", TARGET, gamma=2, max_ngram=1), "chain"),
        "none": lambda: (drafters.make("none", TARGET), "chain"),
    }[name]()
    return passes.Method(
        name, drafter, accept.load(rule), ModelParams(TABLES["target"], drafter.init_params(None))
    )


def job(temperature):
    settings = SETTINGS | {"temperature": temperature}
    prompts = [[1, 2, 0, 3], [4, 4]]
    return passes.Job(
        TARGET, TABLES["target"], prompts, settings, 1, NEW, (), 3, 1, "x", ["p", "q"], spell
    )


@functools.partial(jax.jit, static_argnums=0)
def every_law(model, table, text, how):
    return sampling.to_probs(lm.forward(model, table, text).logits, how)[0]


def law(table, text, settings):
    """f[V] after the text, by the model alone."""
    how = settings | ({"temperature": 1.0} if settings["temperature"] == 0 else {})
    whole = jnp.zeros((1, 24), jnp.int32).at[0, : len(text)].set(jnp.asarray(text))
    found = every_law(
        TARGET if table == "target" else DRAFT,
        TABLES[table],
        whole,
        sampling.make_sampling(1, **how),
    )
    return np.asarray(found)[len(text) - 1]


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("chain", 0.0),
        ("chain", 0.7),
        ("tree", 0.0),
        ("twins", 0.7),
        ("lookup", 0.7),
        ("none", 0.0),
        *(pytest.param(name, 0.7, marks=pytest.mark.slow) for name in ("tree", "none")),
        *(pytest.param(name, 0.0, marks=pytest.mark.slow) for name in ("twins", "lookup")),
    ],
)
def test_a_trace_tells_what_happened(name, temperature):
    work, one = job(temperature), method(name)
    found = token_traces.record(work, one, 1, category="q")
    assert files.problem(found) is None and found["prompt"] == "ee" and found["category"] == "q"
    expected = passes.run_pass(work, one)
    assert [len(r["out"]) for r in found["rounds"]] == expected.emitted[1]
    said = [token[1] for r in found["rounds"] for token in r["out"]]
    assert said == expected.outputs[1]  # the text of the bench's first pass
    assert "".join(token[0] for r in found["rounds"] for token in r["out"]) == spell(said)
    assert name != "none" or terminal.trace(found).plain == "ee" + spell(said)
    text, accepted = [4, 4], 0
    for one_round in found["rounds"]:
        out, nodes = one_round["out"], one_round["draft"]
        kept = [n for n in nodes if n[6]]
        accepted += sum(token[2] == token_traces.ACCEPTED for token in out)
        assert [n[1] for n in kept] == [t[1] for t in out if t[2] == token_traces.ACCEPTED]
        own = [t[2] for t in out if t[2] != token_traces.ACCEPTED]
        deepest = max((len(path_of(nodes, i)) for i in range(len(nodes))), default=0)
        if own:
            [origin] = own  # one token of the target's own, at the end
            ended = not any(n[2] == (nodes.index(kept[-1]) if kept else -1) for n in nodes)
            assert origin == (
                token_traces.PLAIN
                if not nodes
                else token_traces.BONUS
                if ended
                else token_traces.RESIDUAL
            )
        assert len(kept) <= deepest
        for i, node in enumerate(nodes):
            before = text + [nodes[j][1] for j in path_of(nodes, i)[:-1]]
            check(node[1], node[3], node[5], law("target", before, work.settings))
            drawn = law("draft", before, work.settings)[node[1]]
            if name == "lookup":
                assert node[4] == 1
            elif name == "chain" and (temperature or i == 0 or nodes[i - 1][6]):
                assert node[4] == pytest.approx(drawn, rel=1e-3)
        for token in out:
            check(token[1], token[3], token[5], law("target", text, work.settings))
            if name == "chain":
                assert token[4] == pytest.approx(
                    law("draft", text, work.settings)[token[1]], rel=1e-3, abs=1e-9
                )
            text.append(token[1])
    assert (
        expected.counts[1].accepted - 3 <= accepted <= expected.counts[1].accepted
    )  # the last round may be cut


def path_of(nodes, i):
    path = []
    while i >= 0:
        path.insert(0, i)
        i = nodes[i][2]
    return path


def check(token, probability, rank, true):
    assert probability == pytest.approx(true[token], rel=1e-3, abs=1e-9)
    assert rank == (true > true[token] + 1e-9).sum()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_overlap_by_hand(temperature):
    work, one = job(temperature), method("chain")
    outputs = passes.run_pass(work, None).outputs
    found = overlap(
        TARGET,
        one.drafter,
        one.params,
        work.prompts,
        outputs,
        work.settings,
        categories=work.categories,
        decode=spell,
    )
    assert found is not None
    values = []
    for prompt, output in zip(work.prompts, outputs, strict=True):
        for i in range(len(output)):
            both = [law(t, [*prompt, *output[:i]], work.settings) for t in ("target", "draft")]
            if temperature == 0:
                values.append(float(both[0].argmax() == both[1].argmax()))
            else:
                values.append(np.minimum(*both).sum())
    assert found["alpha"] == pytest.approx(np.mean(values), abs=1e-5) and found["tokens"] == 2 * NEW
    assert found["by_category"]["q"] == {
        "alpha": pytest.approx(np.mean(values[NEW:]), abs=1e-5),
        "tokens": NEW,
    }
    assert found["by_class"] == {
        "content": {"alpha": pytest.approx(found["alpha"]), "tokens": 2 * NEW}
    }
    if temperature == 0:
        assert found["by_depth"] == pytest.approx([found["alpha"]] * 3, abs=0.2)
    silent = one.drafter._replace(probs=None, training=None)
    assert overlap(TARGET, silent, one.params, work.prompts, outputs, work.settings) is None


def test_overlap_is_not_the_acceptance_of_survivors():
    """Card A3's pitfall. After a 0 the draft is right, after a 1 always wrong; a full draft's bonus token is never tested."""
    target, draft = np.full((2, V + 1, V, V), 1e-9)
    target[..., 0], target[:, 0, 1] = 0.9, 0.1
    target[:, 1, :2] = 0.5
    draft[...] = target
    draft[:, 1, :2], draft[:, 1, 2] = 1e-9, 1.0
    tables = ModelParams(*(jnp.asarray(np.log(x), jnp.float32) for x in (target, draft)))
    drafter = drafters.make("draft_model", TARGET, model=DRAFT, gamma=3, params=tables.draft)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    work = passes.Job(
        TARGET, tables.target, [[i % 2, i % 2] for i in range(64)], settings, 64, 80, (), 0, 1
    )
    found = overlap(
        TARGET, drafter, tables, work.prompts, passes.run_pass(work, None).outputs, settings
    )
    counts = metrics.total(
        passes.run_pass(work, passes.Method("x", drafter, accept.load("chain"), tables)).counts
    )
    assert found is not None and found["alpha"] == pytest.approx(5 / 6, abs=0.02)
    assert counts.passed.sum() / counts.tested.sum() < 0.81


def test_a_clock_times_the_part_it_is_for():
    """A pass over many tokens takes longer than over one; a draft of many tokens longer than of one; turns add up."""
    target, params = testing.tiny(vocab_size=64, width=128, layers=3)
    draft, own = testing.tiny(vocab_size=64, width=64)
    pair = ModelParams(params, own)
    prompts = [[1, 2, 3]] * 8
    work = passes.Job(target, params, prompts, {"temperature": 0.0}, 8, 64, (), 0, 1)
    plain = jax.block_until_ready(passes.begin(work, *passes._pair(work, None), range(8), prompts))
    short, long = (timing.of_pass(target, size) for size in (1, 48))
    assert min(long.sample(pair, plain) for _ in range(3)) > min(
        short.sample(pair, plain) for _ in range(3)
    )
    made = {
        g: drafters.make("draft_model", target, model=draft, params=own, gamma=g) for g in (1, 8)
    }
    times = {}
    for gamma, drafter in made.items():
        state = jax.block_until_ready(passes.begin(work, drafter, pair, range(8), prompts))
        clock = timing.of_draft(drafter)
        times[gamma] = min(clock.sample(pair, state) for _ in range(3))
        assert timing.of_verify(target, drafter).sample(pair, state) > 0
    assert times[8] > 2 * times[1]
    began = time.perf_counter()
    short.sample(pair, plain)
    assert time.perf_counter() - began < 20 * timing.LEAST
