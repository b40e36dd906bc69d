"""The definitions of tau and alpha on scripted rounds, and what the law check sees."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing, theory
from specjax.bench import lossless, metrics
from specjax.drafters.draft_models import draft_model
from specjax.testing import mutants
from specjax.topology import shapes
from specjax.types import ModelParams, Records

V, ROWS, NEW = 4, 48, 120


def test_counts_of_scripted_rounds():
    """Two rows, gamma 3; row 1 stops after two rounds, and its last round was cut from 3 tokens to 1. Where fewer were
    drafted, the path ended before it could fail."""
    records = Records(
        emitted=np.array([[3, 4], [1, 1], [2, 0], [0, 0]]),
        accepted=np.array([[2, 3], [0, 2], [1, 0], [0, 0]]),
        drafted=np.array([[3, 3], [1, 3], [1, 0], [0, 0]]),
        tested=np.array([[3, 3], [1, 3], [1, 0], [0, 0]]),
    )
    counts = metrics.count(records, [True, True], 3)
    assert (counts.tokens, counts.rounds, counts.accepted) == (11, 5, 8)
    assert counts.tested.tolist() == [5, 3, 3] and counts.passed.tolist() == [4, 3, 1]
    assert metrics.summary(counts) == {
        "tokens": 11,
        "rounds": 5,
        "block_efficiency": 11 / 5,
        "accepted_per_round": 8 / 5,
        "acceptance_rate": 8 / 11,
        "acceptance_by_depth": [4 / 5, 1.0, 1 / 3],
    }
    assert metrics.count(records, [True, False], 3).tokens == 6
    nothing = metrics.summary(metrics.count(Records(*(x[:, :0] for x in records)), [], 3))
    assert nothing["block_efficiency"] is None and nothing["acceptance_by_depth"] is None


def test_acceptance_equals_the_overlap():
    """A draft and a target whose laws do not depend on the context: alpha is sum(min), and tau the capped geometric sum."""
    target, draft = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.2, 0.5, 0.2, 0.1])
    tables = [np.broadcast_to(np.log(p), (V + 1, V, V)) for p in (target, draft)]
    model, gamma, rows = testing.tabular(V), 3, 4000
    made = draft_model.make(model, model=testing.tabular(V, "draft"), gamma=gamma)
    state = start(made, ModelParams(*tables), rows, 60)
    _, records = decode.generate(
        model, made, accept.load("chain"), ModelParams(*tables), state, max_steps=60
    )
    early = Records(*(np.asarray(x)[:10] for x in records))  # before any row meets its limit
    summary = metrics.summary(metrics.count(early, [True] * rows, gamma))
    alpha = np.minimum(target, draft).sum()
    assert summary["acceptance_rate"] == pytest.approx(alpha, abs=0.01)
    assert summary["acceptance_by_depth"] == pytest.approx([alpha] * gamma, abs=0.015)
    assert summary["block_efficiency"] == pytest.approx(
        theory.expected_tokens(alpha, gamma), abs=0.03
    )


def test_twin_siblings_are_one_place():
    """Of two i.i.d. siblings with one token only the younger has a child: it is tested, whichever of them the path names."""
    target, draft = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.2, 0.6, 0.1, 0.1])
    tables = [
        jnp.asarray(np.broadcast_to(np.log(p), (V + 1, V, V)), jnp.float32) for p in (target, draft)
    ]
    keys = {"model": testing.tabular(V, "draft"), "params": tables[1]}
    made = drafters.make(
        "draft_tree", MODEL, tree=shapes.Topology((-1, -1, 1)), siblings="iid", **keys
    )
    state = start(made, ModelParams(*tables), 4000, 40)
    _, records = decode.generate(
        MODEL, made, accept.load("recursive"), ModelParams(*tables), state, max_steps=40
    )
    early = Records(*(np.asarray(x)[:8] for x in records))
    counts = metrics.count(early, [True] * 4000, 2)
    assert counts.passed[1] / counts.tested[1] == pytest.approx(
        np.minimum(target, draft).sum(), abs=0.015
    )


def start(drafter, params, rows, new, temperature=1.0):
    model = testing.tabular(V)
    packed, lengths = decode.pack_prompts([[1, 2]] * rows)
    settings = sampling.make_sampling(rows, temperature)
    keys = rng.row_keys(0, rows)
    return decode.prefill(
        model, drafter, params, packed, lengths, keys, max_len=2 + new, sampling=settings
    )


MODEL = testing.tabular(V)
PAIR = ModelParams(testing.random_table(0, V), testing.random_table(1, V))


def verdict(drafter, rule):
    state, _ = decode.generate(
        MODEL, drafter, rule, PAIR, start(drafter, PAIR, ROWS, NEW), max_steps=NEW
    )
    outputs = decode.outputs(state, [2] * ROWS)
    return lossless.law_check(MODEL, PAIR, [[1, 2]] * ROWS, outputs, {"temperature": 1.0}, drafter)


def test_law_check_lets_the_right_ones_through():
    for drafter in (
        draft_model.make(MODEL, model=testing.tabular(V, "draft"), gamma=2),
        drafters.make("prompt_lookup", MODEL, gamma=3),
        drafters.make("none", MODEL),
    ):
        for name in ("chain", "match", "block"):
            outcome = verdict(drafter, accept.load(name))
            assert outcome.passed, (drafter.name, outcome)


SICK = {m.name: m for m in mutants.MUTANTS}


@pytest.mark.parametrize("name", ["resample_from_target", "match_then_resample"])
def test_law_check_sees_wrong_rules(name):
    drafter = draft_model.make(MODEL, model=testing.tabular(V, "draft"), gamma=2)
    assert verdict(drafter, SICK[name].rule()).passed is False


def test_law_check_sees_wrong_drafts():
    drafter = draft_model.make(MODEL, model=testing.tabular(V, "draft"), gamma=2)
    assert (
        verdict(SICK["argmax_claims_softmax"].change(drafter), accept.load("chain")).passed is False
    )


def test_law_check_says_when_it_cannot_tell():
    outcome = lossless.law_check(MODEL, PAIR, [[1, 2]], [[1, 2, 3]], {"temperature": 1.0})
    assert outcome.passed is None and "3 tokens are too few" in outcome.detail


def test_depths_of_a_tree():
    """On a tree a depth is tested once, however many siblings stand there; a path that ends at a leaf tests no further."""
    from specjax.testing import cases, loop

    for name in ("deterministic", "without_replacement", "chain", "ragged"):
        case = cases.case(name)
        state = loop.begin(
            case.target, case.drafter, case.params, [[2, 1], [0], [1, 1, 2]] * 20, 12, 0
        )
        _, records = decode.generate(
            case.target, case.drafter, accept.load("recursive"), case.params, state, max_steps=12
        )
        accepted, tested, drafted = (
            np.asarray(x) for x in (records.accepted, records.tested, records.drafted)
        )
        ran = drafted > 0
        deep = case.drafter.longest
        assert (tested[ran] >= accepted[ran]).all() and (tested <= deep).all()
        if name != "ragged":  # there the path may end early
            np.testing.assert_array_equal(tested[ran], np.minimum(accepted[ran] + 1, deep))
        summary = metrics.summary(metrics.count(records, [True] * 60, deep))
        assert len(summary["acceptance_by_depth"]) == deep and 0 < summary["acceptance_rate"] < 1
