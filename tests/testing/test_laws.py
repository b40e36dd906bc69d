"""The exact law of every lossless rule, on chains and trees of every kind: total variation below 1e-12 in float64.

Every draft, every coin and every residual draw of a round is walked through, in the real drafter, round and rule; nothing is
sampled. Where the draft laws are dense, vocabularies and trees are as large as the number of histories allows.
"""

from __future__ import annotations

import functools

import jax
import pytest

from specjax import accept, drafters, testing
from specjax.drafters.draft_models import draft_tree
from specjax.testing import cases
from specjax.types import ModelParams

L1 = [name for name in accept.names() if accept.load(name).lossless_class == "L1"]
TREES = ["deterministic", "match", "recursive", "traversal"]


@functools.cache
def made(shape, siblings, vocab):
    target, draft, other = cases.models(vocab)
    if shape == "chain":
        return drafters.make("draft_model", target, model=draft, gamma=3)
    if shape == "several":
        return drafters.make("specinfer", target, models=(draft, other), tree="chain:2")
    tree = cases.IRREGULAR if shape == "irregular" else shape
    return draft_tree.make(target, model=draft, tree=tree, siblings=siblings)


def error(
    drafter,
    rule,
    vocab=3,
    seed=0,
    sparse=False,
    steps=None,
    rounds=1,
    prompt=cases.PROMPT,
    several=False,
    **settings,
):
    with jax.enable_x64(True):
        draft = cases.table(seed + 1, vocab, sparse)
        if several:
            draft = (draft, cases.table(seed + 2, vocab))
        params = ModelParams(cases.table(seed, vocab, sparse and seed % 2 == 1), draft)
        target = cases.models(vocab)[0]
        steps = steps or drafter.longest + 1
        law = testing.exact_law(
            target, drafter, accept.load(rule), params, prompt, steps, rounds=rounds, **settings
        )
        assert abs(law.sum() - 1) < 1e-12
        return testing.total_variation(
            law, testing.sequence_law(target, params.target, prompt, steps, **settings)
        )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rule", L1)
def test_chain(rule, sparse):
    assert error(made("chain", None, 3), rule, seed=int(sparse), sparse=sparse) < 1e-12


@pytest.mark.parametrize("rule", TREES)
def test_two_ary_depth_three_deterministic(rule):
    assert error(made("2x2x2", "top_k", 3), rule) < 1e-12


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_two_ary_depth_three_without_replacement(rule):
    """Fourteen nodes; the draft's laws have one token of three ruled out in half of the contexts."""
    assert error(made("2x2x2", "without_replacement", 3), rule, sparse=True, top_k=2) < 1e-12


@pytest.mark.parametrize(
    ("shape", "rule"), [("2x2x2", "recursive"), ("2x2x2", "traversal"), ("2x2", "k_seq")]
)
def test_two_ary_depth_three_iid(shape, rule):
    """Two tokens; in half of the contexts the draft is certain. K-SEQ, whose bisections take long without jit, less deep."""
    assert error(made(shape, "iid", 2), rule, vocab=2, sparse=True, prompt=[0, 1]) < 1e-12


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_irregular_tree_without_replacement(rule):
    assert error(made("irregular", "without_replacement", 3), rule) < 1e-12


@pytest.mark.parametrize(
    "rule", ["recursive", "traversal", pytest.param("k_seq", marks=pytest.mark.slow)]
)
def test_irregular_tree_iid(rule):
    assert error(made("irregular", "iid", 3), rule, sparse=True) < 1e-12


@pytest.mark.parametrize("rule", TREES)
def test_several_drafters(rule):
    assert error(made("several", None, 3), rule, several=True) < 1e-12


@pytest.mark.parametrize(
    ("shape", "siblings", "rule"),
    [("chain", None, "block"), ("2x1", "without_replacement", "traversal")],
)
def test_all_rounds_with_their_commits(shape, siblings, rule):
    """Four tokens, as many rounds as it takes: caches, positions and the second draft included."""
    steps = 4 if shape == "2x1" else 3
    drafter = made(shape, siblings, 3) if shape != "chain" else cases.case("chain").drafter
    assert error(drafter, rule, steps=steps, rounds=None, temperature=0.8, top_k=2) < 1e-12


def test_what_is_lossy_is_seen_to_be():
    """The measure is not blind: every lossy rule that is given room misses the target's law."""
    for rule, keys in (("typical", {}), ("tolerance", {"top": 2}), ("lenient", {"lenience": 0.5})):
        with jax.enable_x64(True):
            case = cases.case("chain")
            loaded = accept.load(rule, **keys)
            law = testing.exact_law(
                case.target, case.drafter, loaded, case.params, cases.PROMPT, 3, rounds=1
            )
            truth = testing.sequence_law(case.target, case.params.target, cases.PROMPT, 3)
        assert loaded.lossless_class == "L3" and testing.total_variation(law, truth) > 0.01
