"""The exact law of every lossless rule, on chains and trees with siblings of every kind.

The total variation from the target's law is below 1e-12 in float64. Every draft, every coin and
every residual draw of a round is run once, in the real drafter, round and rule; nothing is sampled.

Chains have four tokens. Each kind of siblings has a tree of three levels with three siblings;
``-m slow`` runs other trees, and larger ones, too.
"""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import mutants
import pytest
from marks import by_default

from specjax import accept, control, drafters, testing
from specjax.drafters.draft_models import draft_tree
from specjax.testing import claims, exact, plain_cases
from specjax.types import SIBLINGS, Draft, ModelParams

# Enumeration runs each operation alone: on one worker each is compiled once for all these files.
pytestmark = pytest.mark.xdist_group("enumeration")

L1 = [name for name in accept.names() if accept.load(name).lossless_class == "L1"]
# Rules for siblings of every kind.
TREES = ["deterministic", "match", "recursive", "traversal"]
EXACT = 1e-12


# Every controller with ``LIMITS``, with numbers that give other lengths on the small tables.
LIMITS = (
    "fixed:1",
    "heuristic:1,1,1,0",
    "bass:1,1,3,2",
    "batch_size:1:2/2:1",
    "bandit:ucb,most=3,draft=0.3",
    "bandit:exp3,most=3,draft=0.3,width=0.5",
    "goodput:most=3,draft=0.2,weight=0.5,explore=1",
    "pending:table.json",
)
# The first of these runs by default; the others, ``pass`` with all, and heads are in the second
# tier. (Enumeration compiles operations one by one: each controller takes 40 programs.)
LIMITED = (("pass", LIMITS[3:4]), ("chain", LIMITS[1:2]), ("prompt_lookup", LIMITS[4:5]))


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    """Of ``pending``: lengths by token id."""
    (tmp_path / "table.json").write_text("[1, 3, 0, 2]")
    monkeypatch.chdir(tmp_path)


@functools.cache
def drafter_of(shape, siblings=None, vocab=3):
    target, draft, other = cases.models(vocab)
    if shape == "chain":
        return drafters.make("draft_model", target, model=draft, gamma=3)
    if shape == "several drafters":
        return drafters.make("specinfer", target, models=(draft, other), tree="chain:2")
    tree = cases.IRREGULAR if shape == "irregular" else shape
    return draft_tree.make(target, model=draft, tree=tree, siblings=siblings)


def law_error(
    drafter,
    rule,
    vocab=3,
    seed=0,
    sparse=False,
    steps=None,
    rounds=1,
    prompt=cases.PROMPT,
    **settings,
):
    """The total variation between the law of the emitted text and the target's law."""
    with jax.enable_x64(True):
        draft = cases.table(seed + 1, vocab, sparse)
        if drafter.siblings == "independent":
            draft = (draft, cases.table(seed + 2, vocab))
        params = ModelParams(cases.table(seed, vocab, sparse and seed % 2 == 1), draft)
        target = cases.models(vocab)[0]
        steps = steps or drafter.longest + 1
        law = testing.exact_law(
            target, drafter, accept.load(rule), params, prompt, steps, rounds=rounds, **settings
        )
        assert abs(law.sum() - 1) < EXACT
        truth = testing.sequence_law(target, params.target, prompt, steps, **settings)
        return testing.total_variation(law, truth)


def deep_cases():
    """Every rule on deep drafts of every kind that it takes.

    "holes": some inner nodes are invalid, and in half of the contexts a token has probability 0.
    """
    for kind in SIBLINGS:
        for name in L1:
            if kind in accept.load(name).siblings:
                for variant in ("dense", "sparse", "holes"):
                    # K-SEQ flips the coins of all siblings at once, which gives more histories.
                    slow = name == "k_seq" and kind == "iid" and variant == "dense"
                    # Drafts with holes are sparse too.
                    slow |= variant == "sparse" and (kind != "chain" or name != "k_seq")
                    # Drafts with holes have dense parts too.
                    slow |= variant == "dense" and name not in ("deterministic", "match")
                    # They draw the token first and look for it in the draft, whatever its kind.
                    plain = name in ("deterministic", "match")
                    slow |= plain and (variant == "holes" or kind not in ("chain", "deterministic"))
                    slow |= name == "k_seq" and variant == "holes"
                    # On chains it is ``block``.
                    slow |= name == "gbv" and kind == "chain"
                    marks = [pytest.mark.slow] if slow else []
                    yield pytest.param(kind, name, variant, marks=marks)


@pytest.mark.parametrize(("kind", "rule", "variant"), list(deep_cases()))
def test_deep_drafts(kind, rule, variant):
    """Chains of four; trees of three levels with three siblings."""
    keys = {"holes": variant == "holes", "sparse": variant != "dense"}
    with jax.enable_x64(True):
        case = plain_cases.deep(kind, **keys)
        prompt, steps = plain_cases.prompt(case), case.drafter.longest + 1
        arguments = (case.target, case.drafter, accept.load(rule), case.params, prompt, steps)
        result = testing.enumerated(*arguments, rounds=1)
    assert testing.total_variation(result.law, result.truth) < EXACT
    if variant == "dense":
        assert (result.accepted[1:] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("rule", TREES)
def test_irregular_tree_deterministic(rule):
    assert law_error(drafter_of("irregular", "top_k"), rule) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_irregular_tree_without_replacement(rule):
    assert law_error(drafter_of("irregular", "without_replacement"), rule) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["k_seq", "recursive", "traversal"])
def test_irregular_tree_iid(rule):
    assert law_error(drafter_of("irregular", "iid"), rule, sparse=True) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", TREES)
def test_several_drafters(rule):
    assert law_error(drafter_of("several drafters"), rule) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", TREES)
def test_fourteen_nodes_deterministic(rule):
    assert law_error(drafter_of("2x2x2", "top_k"), rule) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", TREES)
def test_fourteen_nodes_without_replacement(rule):
    """In half of the contexts the draft's probs have one token of three with probability 0."""
    drafter = drafter_of("2x2x2", "without_replacement")
    assert law_error(drafter, rule, sparse=True, top_k=2) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rule"), [("2x2", "k_seq"), *(("2x2x2", r) for r in TREES)])
def test_fourteen_nodes_iid(shape, rule):
    """Two tokens; in half of the contexts the draft is certain.

    K-SEQ on six nodes: it flips the coins of all siblings at once, which gives more histories.
    """
    drafter = drafter_of(shape, "iid", 2)
    assert law_error(drafter, rule, vocab=2, sparse=True, prompt=[0, 1]) < EXACT


@pytest.mark.parametrize(
    ("shape", "siblings", "rule", "steps"),
    by_default(
        [
            ("chain", None, "block", 3),
            ("2x1", "without_replacement", "traversal", 3),
            ("2x1", "without_replacement", "traversal", 4),
        ],
        [("2x1", "without_replacement", "traversal", 3)],
    ),
)
def test_all_rounds_with_their_commits(shape, siblings, rule, steps):
    """All rounds that the tokens need: caches, positions and the second draft included."""
    drafter = cases.case("chain").drafter if shape == "chain" else drafter_of(shape, siblings)
    assert law_error(drafter, rule, steps=steps, rounds=None, temperature=0.8, top_k=2) < EXACT


@pytest.mark.parametrize(
    "rule", by_default(["block", "chain", "k_seq", "recursive", "traversal"], ["recursive"])
)
def test_invalid_nodes_are_never_read(rule):
    """The token of an invalid node may be outside the vocabulary, and its probs NaN."""

    def all_invalid(draft, keys, context):
        return Draft(draft.tokens * 0 - 7, jnp.zeros_like(draft.valid), probs=draft.probs * jnp.nan)

    drafter = mutants.with_draft(all_invalid)(drafter_of("chain"))
    assert law_error(drafter, rule) < EXACT


# By default: the guesses of jacobi with match, in conformance.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["argmax_with_softmax_probs", "declares_other_probs"])
def test_match_takes_any_draft(name):
    """Sample-then-match stays exact with drafts that were not drawn from their probs."""
    drafter = mutants.named(name).change(drafter_of("chain"))
    assert law_error(drafter, "match") < EXACT


def test_deterministic_takes_any_draft():
    """A deterministic draft may drop tokens because of their values."""
    drafter = mutants.named("drops_after_drawing").change(drafter_of("chain"))
    assert law_error(drafter, "deterministic") < EXACT


@pytest.mark.parametrize(
    ("rule", "keys"),
    [
        pytest.param("typical", {}, marks=pytest.mark.slow),
        pytest.param("tolerance", {"top": 2}, marks=pytest.mark.slow),
        ("lenient", {"lenience": 0.5}),
        pytest.param("rollback", {"threshold": 1.5}, marks=pytest.mark.slow),
    ],
)
def test_a_lossy_rule_changes_the_law(rule, keys):
    """The measure can fail: every lossy rule with room to be lossy misses the target's law."""
    with jax.enable_x64(True):
        _, target, drafter, params = cases.case("chain")
        loaded = accept.load(rule, **keys)
        law = testing.exact_law(target, drafter, loaded, params, cases.PROMPT, 3, rounds=1)
        truth = testing.sequence_law(target, params.target, cases.PROMPT, 3)
    assert loaded.lossless_class == "L3" and testing.total_variation(law, truth) > 0.01


def check_limited(case, controls):
    """Two rounds; the second one has what the controller learned of any first one."""
    for text in controls:
        _, target, drafter, params = cases.limited(case, text)
        rule = accept.load(accept.default_rule(drafter))
        with jax.enable_x64(True):
            wide = jax.tree.map(claims.widen, params)
            given = (target, drafter, rule, wide, cases.REPEATED, 3)
            found = exact.enumerated(*given, rounds=2, temperature=0.9)
        assert testing.total_variation(found.law, found.truth) < EXACT, text


@pytest.mark.fast
def test_the_limiting_controllers():
    assert {text.split(":")[0] for text in LIMITS} == set(control.limiting())
    families = {drafters.load(method).__name__.split(".")[2] for method in cases.CONTROLLED}
    assert families == {"draft_models", "heads", "lookup", "self_speculation"}


@pytest.mark.parametrize(("case", "controls"), LIMITED)
def test_two_rounds_with_a_limiting_controller(case, controls):
    check_limited(case, controls)


@pytest.mark.parametrize("case", list(cases.CONTROLLED.values()))
def test_every_drafter_with_every_limiting_controller(case):
    check_limited(case, LIMITS)
