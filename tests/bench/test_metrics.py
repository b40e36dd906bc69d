"""The definitions of tau and alpha on scripted rounds, and what the law check detects."""

from __future__ import annotations

import functools
import itertools

import cases
import jax.numpy as jnp
import mutants
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, testing, theory
from specjax.bench import lossless, metrics
from specjax.drafters.draft_models import draft_model
from specjax.testing import loop
from specjax.topology import shapes
from specjax.types import ModelParams, Records

V, ROWS, NEW = 4, 48, 120
# The same objects in all tests: their programs are compiled once.
MODEL, DRAFT = testing.tabular(V), testing.tabular(V, "draft")
PAIR = ModelParams(testing.random_table(0, V), testing.random_table(1, V))
MUTANTS = {m.name: m for m in mutants.MUTANTS}


@functools.cache
def chain():
    return draft_model.make(MODEL, model=DRAFT, gamma=2)


def start(drafter, params, rows, new, temperature=1.0):
    """The state of ``rows`` rows that continue one prompt with ``new`` tokens."""
    packed, lengths = decode.pack_prompts([[1, 2]] * rows)
    settings = sampling.make_sampling(rows, temperature)
    keys = rng.row_keys(0, rows)
    return decode.prefill(
        MODEL, drafter, params, packed, lengths, keys, max_len=2 + new, sampling=settings
    )


def constant_tables(target, draft):
    """Models whose probabilities do not depend on the context."""
    tables = (np.broadcast_to(np.log(p), (V + 1, V, V)) for p in (target, draft))
    return ModelParams(*(jnp.asarray(table, jnp.float32) for table in tables))


def test_counts_of_scripted_rounds():
    """Two rows, gamma 3. Row 1 stops after two rounds; its last round was cut from 3 tokens to 1.

    In rounds with fewer drafted tokens the path ended before a token could be rejected.
    """
    records = Records(
        emitted=np.array([[3, 4], [1, 1], [2, 0], [0, 0]]),
        accepted=np.array([[2, 3], [0, 2], [1, 0], [0, 0]]),
        drafted=np.array([[3, 3], [1, 3], [1, 0], [0, 0]]),
        tested=np.array([[3, 3], [1, 3], [1, 0], [0, 0]]),
        verified=np.array([[4, 4], [2, 4], [4, 0], [0, 0]]),
    )
    counts = metrics.count(records, [True, True], 3)
    assert (counts.tokens, counts.rounds, counts.accepted) == (11, 5, 8)
    assert counts.tested.tolist() == [5, 3, 3] and counts.passed.tolist() == [4, 3, 1]
    assert metrics.summary(counts) == {
        "tokens": 11,
        "rounds": 5,
        "block_efficiency": 11 / 5,
        "accepted_per_round": 8 / 5,
        "verified_per_round": 18 / 5,
        "acceptance_rate": 8 / 11,
        "acceptance_by_depth": [4 / 5, 1.0, 1 / 3],
    }
    assert metrics.count(records, [True, False], 3).tokens == 6
    empty = metrics.summary(metrics.count(Records(*(x[:, :0] for x in records)), [], 3))
    assert empty["block_efficiency"] is None and empty["acceptance_by_depth"] is None


def test_acceptance_equals_the_overlap():
    """Probabilities that do not depend on the context: alpha is sum(min), and tau the capped
    geometric sum."""
    target, draft = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.2, 0.5, 0.2, 0.1])
    gamma, rows = 3, 4000
    drafter = draft_model.make(MODEL, model=DRAFT, gamma=gamma)
    params = constant_tables(target, draft)
    state = start(drafter, params, rows, 60)
    _, records = decode.generate(MODEL, drafter, accept.load("chain"), params, state, max_steps=60)
    early = Records(*(np.asarray(x)[:10] for x in records))  # before any row reaches its limit
    summary = metrics.summary(metrics.count(early, [True] * rows, gamma))
    alpha = np.minimum(target, draft).sum()
    assert summary["acceptance_rate"] == pytest.approx(alpha, abs=0.01)
    assert summary["acceptance_by_depth"] == pytest.approx([alpha] * gamma, abs=0.015)
    assert summary["block_efficiency"] == pytest.approx(
        theory.expected_tokens(alpha, gamma), abs=0.03
    )


def test_siblings_with_the_same_token_are_one_node():
    """Of two i.i.d. siblings only the second has a child. If both have the same token, the child is
    tested when the path contains either of them."""
    target, draft = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.2, 0.6, 0.1, 0.1])
    params, rows = constant_tables(target, draft), 4000
    drafter = drafters.make(
        "draft_tree",
        MODEL,
        tree=shapes.Topology((-1, -1, 1)),
        siblings="iid",
        model=DRAFT,
        params=params.draft,
    )
    state, rule = start(drafter, params, rows, 40), accept.load("recursive")
    _, records = decode.generate(MODEL, drafter, rule, params, state, max_steps=40)
    early = Records(*(np.asarray(x)[:8] for x in records))
    counts = metrics.count(early, [True] * rows, 2)
    assert counts.passed[1] / counts.tested[1] == pytest.approx(
        np.minimum(target, draft).sum(), abs=0.015
    )


def check(drafter, rule):
    """The result of the law check on what this pair decodes."""
    state = start(drafter, PAIR, ROWS, NEW)
    state, _ = decode.generate(MODEL, drafter, rule, PAIR, state, max_steps=NEW)
    outputs = decode.outputs(state, [2] * ROWS)
    given = PAIR, [[1, 2]] * ROWS, outputs, {"temperature": 1.0}, drafter
    return lossless.law_check(lossless.Texts(MODEL, *given))


@pytest.mark.parametrize(
    ("drafter", "rule"),
    by_default(
        itertools.product(("chain", "lookup", "none"), ("chain", "match", "block")),
        [("chain", "block"), ("lookup", "chain"), ("none", "match")],
    ),
)
def test_the_law_check_passes_correct_methods(drafter, rule):
    lookup = drafters.make("prompt_lookup", MODEL, gamma=3)
    made = {"chain": chain(), "lookup": lookup, "none": drafters.make("none", MODEL)}[drafter]
    result = check(made, accept.load(rule))
    assert result.passed, result


@pytest.mark.parametrize("name", ["resample_from_target", "match_then_resample"])
def test_the_law_check_detects_wrong_rules(name):
    assert check(chain(), MUTANTS[name].rule()).passed is False


def test_the_law_check_detects_wrong_drafts():
    wrong = MUTANTS["argmax_with_softmax_probs"].change(chain())
    assert check(wrong, accept.load("chain")).passed is False


def test_the_law_check_does_not_decide_with_few_tokens():
    texts = lossless.Texts(MODEL, PAIR, [[1, 2]], [[1, 2, 3]], {"temperature": 1.0})
    result = lossless.law_check(texts)
    assert result.passed is None and "3 tokens are too few" in result.detail


@pytest.mark.parametrize(
    "name",
    by_default(["deterministic", "without_replacement", "chain", "ragged"], ["chain", "ragged"]),
)
def test_depths_of_a_tree(name):
    """A depth of a tree is tested once, for any number of siblings; a path that ends at a leaf
    tests no further depth."""
    case, rule = cases.case(name), accept.load("recursive")
    prompts = [[2, 1], [0], [1, 1, 2]] * 20
    state = loop.begin(case.target, case.drafter, case.params, prompts, 12, 0)
    _, records = decode.generate(case.target, case.drafter, rule, case.params, state, max_steps=12)
    accepted, tested, drafted = (
        np.asarray(x) for x in (records.accepted, records.tested, records.drafted)
    )
    ran = drafted > 0
    longest = case.drafter.longest
    assert (tested[ran] >= accepted[ran]).all() and (tested <= longest).all()
    if name != "ragged":  # there a path may end before the last level
        np.testing.assert_array_equal(tested[ran], np.minimum(accepted[ran] + 1, longest))
    summary = metrics.summary(metrics.count(records, [True] * len(prompts), longest))
    assert len(summary["acceptance_by_depth"]) == longest and 0 < summary["acceptance_rate"] < 1
