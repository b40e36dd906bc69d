"""The study of draft lengths under load: its traces are what decoding does, and it runs."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sized_cases

from experiments.goodput import costs as costs_study
from experiments.goodput import run as study
from experiments.goodput import traces as traces_study
from experiments.goodput import trees as trees_study
from specjax import accept, control, decode, drafters, files, rng, sampling
from specjax.bench import replay
from specjax.bench.passes import Method
from specjax.bench.replay import recorded
from specjax.data.recordings import Trace
from specjax.models import hf
from specjax.testing.models import tiny, tiny_config
from specjax.theory import load, policies
from specjax.types import ModelParams

VOCAB, LONGEST, TOKENS = 6, 4, 40


@pytest.fixture(scope="module")
def texts():
    """Texts of few tokens, so that lookups find and miss."""
    random = np.random.default_rng(0)
    return [
        Trace(
            random.integers(0, VOCAB, 12 + 3 * i).tolist(), random.integers(0, VOCAB, 60).tolist()
        )
        for i in range(3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt_lookup", "draft_model"])
def test_a_simulated_request_takes_the_rounds_of_replay(texts, name):
    """The traces of drafts of 4 tokens give the rounds of every shorter draft."""
    model, params = tiny(vocab_size=VOCAB)
    lm = recorded(VOCAB)
    keys = {"prompt_lookup": {}, "draft_model": {"model": model, "params": params}}[name]
    longest = drafters.make(name, lm, gamma=LONGEST, **keys)
    traces, short = traces_study.trace_all(longest, texts, TOKENS)
    assert short == 0 and traces.accepted.max() >= 1
    for gamma in (1, 2, LONGEST):
        drafter = drafters.make(name, lm, gamma=gamma, **keys)
        rule = accept.load(accept.default_rule(drafter))
        method = Method(
            name, drafter, rule, ModelParams({}, drafter.init_params(jax.random.key(0)))
        )
        for row, text in enumerate(texts):
            # The last draft of replay ends with the recording: give it what a trace has beyond.
            cut = text._replace(output=text.output[:TOKENS])
            [(counts, _)] = replay.measure_rounds(method, [cut], batch_size=1)
            request = load.Requests(np.zeros(1), np.array([row]), np.array([TOKENS]))
            served = load.simulate(
                request, traces, policies.FixedLength(gamma), lambda work: 1.0, max_batch=1
            )
            assert len(served.end) == counts.rounds


@pytest.mark.slow
def test_the_study_runs(tmp_path, texts, quiet):
    path = tmp_path / "target"
    hf.save(path, tiny_config(vocab_size=16), tiny(vocab_size=16)[1])
    flags = [f"--target={path}", "--rows", "1", "2", "--widths", "1", "3", "--context=8"]
    flags += ["--more=8", "--prompt=8", "--samples=1", f"--out={tmp_path / 'costs.json'}"]
    costs_study.main(flags)
    times = json.loads((tmp_path / "costs.json").read_text())
    assert [size for size, _ in times["passes"]] == [1, 2, 3, 6, 8]
    assert len(times["drafts"]) == 2 and times["spread"] >= 0
    lines = [{"prompt_ids": t.prompt, "output_ids": t.output} for t in texts]
    recording = tmp_path / "recording.jsonl"
    recording.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, draft in (("lookup", []), ("draft", [f"--draft={path}"])):
        out = [f"--out={tmp_path / name}.npz", "--longest=3", "--tokens=32"]
        traces_study.main([f"--recording={recording}", f"--target={path}", *draft, *out])
    flags = ["--longest=2", "--seeds=2", "--loads", "0.5", "1.2", "--size=0.02"]
    for out in ("results", "again"):
        study.main([*flags, f"--files={tmp_path}", f"--out={tmp_path / out}.json"])
    first, second = (files.read_json(tmp_path / f"{n}.json") for n in ("results", "again"))
    assert first["rows"] == second["rows"]  # deterministic
    assert len(first["rows"]) == 3 * 2 * 6
    for row in first["rows"]:
        if row["policy"] == row["best_fixed"]["goodput"]:
            assert row["relative_goodput"] == [1.0, 0.0]


PROMPTS, SHAPE = [[1, 2, 3], [5, 4, 3]], {"tree": "dynamic", "nodes": 9, "depth": 3, "top_k": 3}


def pair():
    """A tiny target with a draft model near it."""
    target, params = tiny(vocab_size=16)
    noise = np.random.default_rng(5)
    noisy = jax.tree.map(
        lambda x: x + 0.1 * np.std(x) * noise.normal(size=x.shape).astype(np.float32), params
    )
    draft = target._replace(name="draft")
    loaded = (hf.Loaded(target, params, None, None, ""), hf.Loaded(draft, noisy, None, None, ""))
    return trees_study.Models(*loaded, PROMPTS, 40)


def check_against_the_loop(models, rows, text):
    """The rounds that were played are those of the decode loop with this controller."""
    drafter = models.make("draft_model", **SHAPE, control=text)
    packed, lengths = decode.pack_prompts(models.prompts)
    state = decode.prefill(
        *(models.target.lm, drafter, models.params(drafter), packed, lengths, rng.row_keys(0, 2)),
        max_len=packed.shape[1] + 40,
        limit=jnp.asarray(lengths) + 40,
        sampling=sampling.make_sampling(2, 0.0),
    )
    given = accept.load("deterministic"), models.params(drafter), state
    _, records = decode.generate(models.target.lm, drafter, *given, max_steps=40)
    verified, emitted = np.asarray(records.verified), np.asarray(records.emitted)
    live = (emitted > 0).all(1)
    assert rows.rounds == live.sum() and rows.nodes == (verified[live].max(1) - 1).sum()
    assert rows.tokens == emitted[live].mean(1).sum()
    return set(verified[live].max(1).tolist())


def test_played_trees_are_those_of_the_decode_loop():
    """Rounds, tokens and verified nodes of ``budget``, played along a text, and decoded."""
    models, text = pair(), "budget:draft=0.1,verify=0.1,weight=1"
    texts = trees_study.texts_of(models, 0.0)
    places = trees_study.trees_of(
        models, models.make("draft_model", **SHAPE, control=trees_study.recorder(9)), texts
    )
    rows = trees_study.Rows(models, texts)
    functions = trees_study.played(control.parse(text))
    trees_study.play_budget(rows, places, functions, 0.0, (lambda nodes: 1.0, 3, True))
    assert len(check_against_the_loop(models, rows, text)) > 1


def test_played_policies_are_those_of_the_decode_loop(tmp_path, monkeypatch):
    """The same of ``ltd``, with random policies."""
    for name, value in (("TREES", (9,)), ("DEPTH", 3), ("TOP_K", 3)):
        monkeypatch.setattr(trees_study, name, value)
    models = pair()
    texts = trees_study.texts_of(models, 0.0)
    grown = trees_study.grown_of(models, texts)
    assert grown.tokens.max() == 4
    for seed in range(2):
        text, known = sized_cases.written(tmp_path, 9, seed)
        rows, policies = trees_study.Rows(models, texts), (known.greedy.policy,) * 2
        setting = trees_study.Setting("free", 2, lambda n: 1.0, lambda n: 0.0)
        trees_study.play_ltd(rows, [0, 1], grown, policies, setting)
        check_against_the_loop(models, rows, text)
