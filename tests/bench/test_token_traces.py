"""Traces against the decode loop and the models, the overlap against sums by hand, and clocks."""

from __future__ import annotations

import functools
import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, drafters, sampling, testing
from specjax.bench import lossless, metrics, passes, timing, token_traces
from specjax.bench.overlap import overlap
from specjax.models import lm
from specjax.report import inputs, terminal
from specjax.topology.shapes import Topology
from specjax.types import ModelParams

V, NEW = 5, 12
TARGET, DRAFT, _ = cases.models(V)
TABLES = {"target": cases.table(0, V), "draft": cases.table(1, V)}
SETTINGS = {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
PROMPTS = [[1, 2, 0, 3], [4, 4]]
DRAFTERS = {
    "chain": ("draft_model", "chain", {"gamma": 3}),
    "tree": ("draft_tree", "recursive", {"tree": "2x2x1"}),
    "twins": (
        "draft_tree",
        "recursive",
        {"tree": Topology((-1, -1, -1, 1, 2, 4)), "siblings": "iid"},
    ),
    "lookup": ("prompt_lookup", "chain", {"gamma": 2, "max_ngram": 1}),
    "none": ("none", "chain", {}),
}


def spell(ids):
    return "".join("abcde"[i] for i in ids)


@functools.cache  # the same drafter at all temperatures: one program
def method(name):
    drafter_name, rule, keys = DRAFTERS[name]
    if drafter_name.startswith("draft"):
        keys = {**keys, "model": DRAFT, "params": TABLES["draft"]}
    drafter = drafters.make(drafter_name, TARGET, **keys)
    params = ModelParams(TABLES["target"], drafter.init_params(None))
    return passes.Method(name, drafter, accept.load(rule), params)


def job(temperature):
    return passes.Job(
        target=TARGET,
        params=TABLES["target"],
        prompts=PROMPTS,
        settings=SETTINGS | {"temperature": temperature},
        batch_size=1,
        max_new_tokens=NEW,
        eos_id=(),
        seed=3,
        repeats=1,
        name="x",
        categories=["p", "q"],
        spell=spell,
    )


@functools.partial(jax.jit, static_argnums=0)
def probs_along(model, table, text, how):
    return sampling.to_probs(lm.forward(model, table, text).logits, how)[0]


def probs_after(text, name, settings):
    """f[V] after the text, by the target or the draft model alone."""
    how = settings | ({"temperature": 1.0} if settings["temperature"] == 0 else {})
    padded = jnp.zeros((1, 24), jnp.int32).at[0, : len(text)].set(jnp.asarray(text))
    model = TARGET if name == "target" else DRAFT
    probs = probs_along(model, TABLES[name], padded, sampling.make_sampling(1, **how))
    return np.asarray(probs)[len(text) - 1]


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("chain", 0.7),
        ("none", 0.0),
        *(
            pytest.param(name, 0.7, marks=pytest.mark.slow)
            for name in ("tree", "twins", "lookup", "none")
        ),
        *(
            pytest.param(name, 0.0, marks=pytest.mark.slow)
            for name in ("chain", "tree", "twins", "lookup")
        ),
    ],
)
def test_a_trace_shows_what_was_decoded(name, temperature):
    work, one = job(temperature), method(name)
    trace = token_traces.record(work, one, 1)
    assert inputs.trace_problem(trace) is None
    assert trace["prompt"] == "ee" and trace["category"] == "q"
    expected = passes.run_pass(work, one)
    assert [len(r["out"]) for r in trace["rounds"]] == expected.emitted[1]
    output = [token[1] for r in trace["rounds"] for token in r["out"]]
    assert output == expected.outputs[1]  # the text of the first pass of a bench
    assert "".join(token[0] for r in trace["rounds"] for token in r["out"]) == spell(output)
    assert name != "none" or terminal.trace(trace).plain == "ee" + spell(output)
    text, accepted = [4, 4], 0
    for one_round in trace["rounds"]:
        accepted += check_origins(one_round)
        check_nodes(name, one_round["draft"], text, work.settings)
        for token in one_round["out"]:
            check_scores(token[1], token[3], token[5], probs_after(text, "target", work.settings))
            if name == "chain":
                drawn = probs_after(text, "draft", work.settings)[token[1]]
                assert token[4] == pytest.approx(drawn, rel=1e-3, abs=1e-9)
            text.append(token[1])
    # The last round may be cut.
    assert expected.counts[1].accepted - 3 <= accepted <= expected.counts[1].accepted


def check_origins(one_round):
    """Checks where the tokens of a round come from; the number of accepted ones."""
    out, nodes = one_round["out"], one_round["draft"]
    path = [n for n in nodes if n[6]]
    accepted = [t[1] for t in out if t[2] == token_traces.ACCEPTED]
    assert [n[1] for n in path] == accepted
    assert len(path) <= max((len(path_of(nodes, i)) for i in range(len(nodes))), default=0)
    own = [t[2] for t in out if t[2] != token_traces.ACCEPTED]
    if own:
        [origin] = own  # one token of the target's own, the last
        end = nodes.index(path[-1]) if path else -1
        if not nodes:
            assert origin == token_traces.PLAIN
        elif any(n[2] == end for n in nodes):
            assert origin == token_traces.RESIDUAL
        else:
            assert origin == token_traces.BONUS
    return len(accepted)


def check_nodes(name, nodes, text, settings):
    """Checks the probabilities and ranks of the nodes of a round that follows ``text``."""
    for i, node in enumerate(nodes):
        before = text + [nodes[j][1] for j in path_of(nodes, i)[:-1]]
        check_scores(node[1], node[3], node[5], probs_after(before, "target", settings))
        if name == "lookup":
            assert node[4] == 1
        elif name == "chain" and (settings["temperature"] or i == 0 or nodes[i - 1][6]):
            drawn = probs_after(before, "draft", settings)[node[1]]
            assert node[4] == pytest.approx(drawn, rel=1e-3)


def path_of(nodes, i):
    path = []
    while i >= 0:
        path.insert(0, i)
        i = nodes[i][2]
    return path


def check_scores(token, probability, rank, probs):
    assert probability == pytest.approx(probs[token], rel=1e-3, abs=1e-9)
    assert rank == (probs > probs[token] + 1e-9).sum()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_overlap_by_hand(temperature):
    work, one = job(temperature), method("chain")
    outputs = passes.run_pass(work, None).outputs
    given = one.params, work.prompts, outputs, work.settings, one.drafter
    texts = lossless.Texts(TARGET, *given)
    result = overlap(texts, categories=work.categories, decode=spell)
    assert result is not None
    values = []
    for prompt, output in zip(work.prompts, outputs, strict=True):
        for i in range(len(output)):
            text = [*prompt, *output[:i]]
            both = [probs_after(text, model, work.settings) for model in ("target", "draft")]
            if temperature == 0:
                values.append(float(both[0].argmax() == both[1].argmax()))
            else:
                values.append(np.minimum(*both).sum())
    assert result["alpha"] == pytest.approx(np.mean(values), abs=1e-5)
    assert result["tokens"] == 2 * NEW
    assert result["by_category"]["q"] == {
        "alpha": pytest.approx(np.mean(values[NEW:]), abs=1e-5),
        "tokens": NEW,
    }
    assert result["by_class"] == {
        "content": {"alpha": pytest.approx(result["alpha"]), "tokens": 2 * NEW}
    }
    if temperature == 0:
        assert result["by_depth"] == pytest.approx([result["alpha"]] * 3, abs=0.2)
    unknown = one.drafter._replace(probs=None, training=None)
    assert overlap(texts._replace(drafter=unknown)) is None


def test_the_overlap_is_not_the_acceptance_rate_of_a_loop():
    """After token 0 the draft is right, after token 1 always wrong. A loop tests fewer positions
    after 1 than the text has: the token after a full draft is never tested."""
    target, draft = np.full((2, V + 1, V, V), 1e-9)
    target[..., 0], target[:, 0, 1] = 0.9, 0.1
    target[:, 1, :2] = 0.5
    draft[...] = target
    draft[:, 1, :2], draft[:, 1, 2] = 1e-9, 1.0
    tables = ModelParams(*(jnp.asarray(np.log(x), jnp.float32) for x in (target, draft)))
    drafter = drafters.make("draft_model", TARGET, model=DRAFT, gamma=3, params=tables.draft)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    prompts = [[i % 2, i % 2] for i in range(64)]
    work = passes.Job(TARGET, tables.target, prompts, settings, 64, 80, (), 0, 1)
    outputs = passes.run_pass(work, None).outputs
    texts = lossless.Texts(TARGET, tables, work.prompts, outputs, settings, drafter)
    result = overlap(texts)
    one = passes.Method("x", drafter, accept.load("chain"), tables)
    counts = metrics.total(passes.run_pass(work, one).counts)
    assert result is not None and result["alpha"] == pytest.approx(5 / 6, abs=0.02)
    assert counts.passed.sum() / counts.tested.sum() < 0.81


@pytest.mark.slow
def test_a_clock_times_its_own_part():
    """A pass over many tokens takes longer than one over one token, a draft of many tokens longer
    than a draft of one; the number of iterations follows from the time of one."""
    target, params = testing.tiny(vocab_size=64, width=128, layers=3)
    draft, own = testing.tiny(vocab_size=64, width=64)
    pair = ModelParams(params, own)
    prompts = [[1, 2, 3]] * 8
    work = passes.Job(target, params, prompts, {"temperature": 0.0}, 8, 64, (), 0, 1)
    drafter, _ = passes.drafter_and_params(work, None)
    plain = jax.block_until_ready(passes.begin(work, drafter, pair, range(8), prompts))
    short, long = (timing.of_pass(target, size) for size in (1, 48))
    assert best(long, pair, plain) > best(short, pair, plain)
    times = {}
    for gamma in (1, 8):
        drafter = drafters.make("draft_model", target, model=draft, params=own, gamma=gamma)
        state = jax.block_until_ready(passes.begin(work, drafter, pair, range(8), prompts))
        times[gamma] = best(timing.of_draft(drafter), pair, state)
        assert timing.of_verify(target, drafter).sample(pair, state) > 0
    assert times[8] > 2 * times[1]
    began = time.perf_counter()
    short.sample(pair, plain)
    assert time.perf_counter() - began < 20 * timing.MIN_SECONDS


def best(clock, params, state):
    """The smallest of three samples."""
    return min(clock.sample(params, state) for _ in range(3))
