"""The form of verdicts, the greedy limit, degenerate drafts, admissible pairs, bad keys."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import accept, drafters, testing
from specjax.accept import block, chain, traversal
from specjax.drafters.draft_models import draft_tree
from specjax.errors import UserError
from specjax.rng import RowKeys, row_keys
from specjax.types import CHAIN, SIBLINGS, UNCOUPLED, Draft

pytestmark = pytest.mark.fast
V, GAMMA = 3, 3
# Many rows for the statistical test; the tests of the form check the first CHECKED rows. All tests
# use the same shapes, so that they share compiled programs.
ROWS, CHECKED = 20_000, 300
PARENTS = [-1, -1, 0, 0, 2]
# Rules that do not read ``Draft.probs``.
IDS_ONLY = ("coupled", "deterministic", "match", "rollback", "tolerance", "typical")
load = functools.cache(accept.load)


@functools.cache
def sampled(name):
    return jax.jit(load(name).sampled)


@functools.cache
def blocks(seed, with_tree=False):
    """(keys, a random draft, random target probs) for all rows."""
    rng = np.random.default_rng(seed)
    size = len(PARENTS) if with_tree else GAMMA
    draft = Draft(
        tokens=jnp.asarray(rng.integers(0, V, (ROWS, size)), jnp.int32),
        valid=jnp.asarray(rng.random((ROWS, size)) < 0.8),
        parents=jnp.broadcast_to(jnp.asarray(PARENTS), (ROWS, size)) if with_tree else None,
        probs=jnp.asarray(rng.dirichlet(np.ones(V), (ROWS, size)), jnp.float32),
        depth=3 if with_tree else None,
    )
    target = jnp.asarray(rng.dirichlet(np.ones(V), (ROWS, size + 1)), jnp.float32)
    keys = RowKeys(row_keys(seed, ROWS), jnp.asarray(3), jnp.full((ROWS,), 9))
    return keys, draft, target


def shapes_for(rule):
    """Whether the draft is a tree, for each kind that the rule takes."""
    return (False,) if rule.siblings == (CHAIN,) else (False, True)


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        (name, deterministic)
        for name in accept.names()
        for deterministic in (False, True)
        if not (deterministic and name in IDS_ONLY)
    ],
)
def test_verdicts_are_well_formed(name, deterministic):
    for with_tree in shapes_for(load(name)):
        keys, draft, target = blocks(0, with_tree)
        if deterministic:
            draft = draft.replace(probs=None)
        verdict = sampled(name)(keys, draft, target)
        parents = PARENTS if with_tree else range(-1, GAMMA - 1)
        arrays = (draft.tokens, draft.valid, verdict.tokens, verdict.count, verdict.path)
        rows = zip(*(np.asarray(x[:CHECKED]).tolist() for x in arrays), strict=True)
        for drafted, valid, tokens, count, path in rows:
            kept = path[: count - 1]
            assert min(kept, default=0) >= 0 and set(path[count - 1 :]) <= {-1}
            for above, node in zip([-1, *kept], kept, strict=False):
                assert valid[node]
                # With independent siblings the parent may be a copy of the node above.
                parent = parents[node]
                copy = above >= 0 and parent >= 0 and drafted[parent] == drafted[above]
                assert parent == above or copy
            assert tokens[: count - 1] == [drafted[node] for node in kept]
            assert 0 <= tokens[count - 1] < V and set(tokens[count:]) <= {-1}


@pytest.mark.parametrize("name", IDS_ONLY)
def test_rules_that_read_ids_only(name):
    """Their program does not depend on the draft's probs."""
    keys, draft, target = blocks(0)
    with_probs = jax.make_jaxpr(lambda d: load(name).sampled(keys, d.replace(probs=None), target))
    without = jax.make_jaxpr(lambda d: load(name).sampled(keys, d, target))
    assert str(with_probs(draft)) == str(without(draft))


@pytest.mark.parametrize("name", accept.names())
def test_a_one_hot_target_gives_the_greedy_verdict(name):
    for with_tree in shapes_for(load(name)):
        keys, draft, target = blocks(0, with_tree)
        best = jnp.argmax(target, -1)
        verdict = sampled(name)(keys, draft, jax.nn.one_hot(best, V))
        greedy = jax.jit(load(name).greedy)(draft, jnp.log(target))
        np.testing.assert_array_equal(verdict.count, greedy.count)
        np.testing.assert_array_equal(verdict.tokens, greedy.tokens)


@pytest.mark.parametrize(
    "name", [name for name in accept.names() if load(name).lossless_class == "L1"]
)
def test_a_deterministic_draft_keeps_the_distribution(name):
    """For one-hot drafts the first emitted token has the target's distribution."""
    probs, rounds = np.array((0.5, 0.3, 0.2)), 5
    target = jnp.broadcast_to(jnp.asarray(probs, jnp.float32), (ROWS, GAMMA + 1, V))
    keys, draft, _ = blocks(0)
    draft = draft.replace(
        tokens=jnp.ones((ROWS, GAMMA), jnp.int32),
        valid=jnp.ones((ROWS, GAMMA), bool),
        probs=draft.probs if name in IDS_ONLY else None,
    )
    counts = np.zeros(V, int)
    for step in range(rounds):
        keys = keys.replace(round=jnp.asarray(step), position=jnp.full((ROWS,), step))
        first = sampled(name)(keys, draft, target).tokens[:, 0]
        counts += np.bincount(np.asarray(first), minlength=V)
    assert counts.sum() == 100_000
    assert testing.chi_square(counts, probs)[2] > 1e-3


# Lossy rules at temperature 0.


def test_tolerance_of_blockwise_decoding_and_specdec():
    logits = jnp.asarray([[[0.0, 3.0, 2.0, 1.0]] * 4])

    def length(tokens, **keys):
        draft = Draft(jnp.asarray([tokens]), jnp.ones((1, 3), bool))
        verdict = accept.load("tolerance", **keys).greedy(draft, logits)
        count = int(verdict.count[0])
        # After the draft tokens: the target's best.
        assert int(verdict.tokens[0, count - 1]) == 1
        return count - 1

    assert length([1, 1, 2]) == 2
    assert length([1, 2, 3], top=2) == 2 and length([1, 2, 3], top=3) == 3
    assert length([1, 2, 3], top=4, gap=1.0) == 2 and length([1, 2, 3], top=4, gap=2.0) == 3
    assert length([2, 0, 3], distance=1) == 2
    assert length([0, 0, 1], least=1) == 1 and length([0, 0, 1], least=2) == 3
    logits = logits.at[..., 0].set(-jnp.inf)  # banned: never emitted
    assert length([0, 0, 1], least=2) == 0 and length([2, 0, 3], distance=1) == 1
    assert length([1, 2, 0], top=4) == 2


def test_the_gap_of_sampled_rows_is_that_of_their_log_probabilities():
    """After temperature and cut-offs: 0.5 and 1 nats at temperature 2, infinite if cut off."""
    logits = jnp.asarray([[[-jnp.inf, 3.0, 2.0, 1.0]] * 4])
    draft = Draft(jnp.asarray([[1, 2, 3]]), jnp.ones((1, 3), bool))
    keys = RowKeys(row_keys(0, 1), jnp.asarray(0), jnp.zeros(1, jnp.int32))
    for temperature, gap, right in ((1, 0.9, 1), (1, 1.9, 2), (2, 0.9, 2), (2, 1.1, 3), (2, 0, 1)):
        probs = jax.nn.softmax(logits / temperature)
        rule = accept.load("tolerance", top=4, gap=gap)
        verdict = rule.sampled(keys, draft, probs)
        assert int(verdict.count[0]) - 1 == right, (temperature, gap)
    excluded = Draft(jnp.asarray([[1, 0, 3]]), jnp.ones((1, 3), bool))
    verdict = accept.load("tolerance", top=4).sampled(keys, excluded, probs)
    assert int(verdict.count[0]) - 1 == 1


def test_lenience_at_temperature_zero_compares_probabilities():
    logits = jnp.log(jnp.asarray([[[0.5, 0.3, 0.2]] * 3]))
    draft = Draft(jnp.asarray([[1, 2]]), jnp.ones((1, 2), bool))
    counts = [
        int(accept.load("lenient", lenience=x).greedy(draft, logits).count[0]) - 1
        for x in (1.0, 0.61, 0.59, 0.39)
    ]
    assert counts == [0, 0, 1, 2]


LENIENT_ROWS = {"temperature": [1.0, 1.0, 0.0, 0.0, 0.7, 1.0], "top_k": [0, 2, 0, 0, 0, 0]}
LENIENCES = [1.0, 0.3, 1.0, 0.3, 0.3, 1.0]


def lenient_texts(rule, **settings):
    """The texts of six ragged rows, three of them with lenience 1."""
    target, draft = testing.tabular(8), testing.tabular(8, "draft")
    drafter = drafters.make("draft_model", target, model=draft, gamma=3)
    prompts, lengths = sj.pack_prompts([[1, 2], [3], [4, 5, 6], [2], [7, 1], [5]])
    params = sj.ModelParams(testing.random_table(0, 8), testing.random_table(1, 8))
    how = sj.make_sampling(6, **LENIENT_ROWS, **settings)
    keys = sj.row_keys(3, rows=6)
    state = sj.prefill(target, drafter, params, prompts, lengths, keys, max_len=40, sampling=how)
    state, _ = sj.generate(target, drafter, rule, params, state, max_steps=40)
    return [list(map(int, each)) for each in sj.outputs(state, lengths)]


def test_each_row_has_its_own_lenience():
    """In one program: rows with 1 have the texts of ``chain``, the others those of one value."""
    rows = lenient_texts(load("lenient", lenience=0.5), lenience=LENIENCES)
    exact = lenient_texts(load("chain"))
    loose = lenient_texts(load("lenient", lenience=0.3))
    wanted = [exact[i] if x == 1 else loose[i] for i, x in enumerate(LENIENCES)]
    assert rows == wanted
    assert all(exact[i] != loose[i] for i, x in enumerate(LENIENCES) if x < 1)


def test_lenience_of_rows_needs_a_rule_that_takes_it():
    with pytest.raises(UserError, match="the rule chain takes no lenience; the rule with one is"):
        lenient_texts(load("chain"), lenience=0.5)
    with pytest.raises(UserError, match=r"lenience is 2; it must be in \(0, 1\]"):
        sj.make_sampling(2, lenience=[1.0, 2.0])


# Rounding.


def test_a_vanishing_residual_becomes_the_target():
    p = jnp.asarray([[[0.5, 0.3, 0.2]] * 2], jnp.float32)
    draft = Draft(jnp.asarray([[0]]), jnp.asarray([[True]]), probs=p[:, :1])
    leftover = jax.jit(chain.leftover)(jnp.asarray([0]), draft, p)
    np.testing.assert_array_equal(leftover, p[:, 0])


def test_small_residuals_are_not_lost_in_float32():
    """Draft and target that differ by a millionth; 1 - weight is exactly 0."""
    probs = jnp.asarray([[0.3, 0.3, 0.4]], jnp.float32)
    near = probs + jnp.asarray([[1e-6, -1e-6, 0]], jnp.float32)
    one = jnp.ones((1,), jnp.float32)
    weight, left = jax.jit(traversal.reject_child)(one, probs, near)
    # The root is always accepted.
    assert float(weight[0]) == 1.0
    np.testing.assert_allclose(left, [[0, 1, 0]], atol=1e-6)
    draft = Draft(jnp.asarray([[0, 0]]), jnp.ones((1, 2), bool), probs=jnp.stack([probs, near], 1))
    target, weights = jnp.stack([probs] * 3, 1), jnp.ones((1, 3), jnp.float32)
    kept, total = jax.jit(block.chances)(draft, target, weights)
    # The first token has weight 1: its test always passes.
    assert float(kept[0, 0]) == float(total[0, 0]) > 0


# Pairs and keys.


@functools.cache
def tree(siblings):
    target, draft = testing.tabular(3), testing.tabular(3, "draft")
    return draft_tree.make(target, model=draft, tree="2", siblings=siblings)


def test_admissible_pairs():
    """A rule takes exactly the kinds for which its lossless class holds."""
    takes = {name: set(load(name).siblings) for name in accept.names()}
    chains = {name for name, kinds in takes.items() if kinds == {CHAIN}}
    assert chains == {"block", "chain", "lenient", "rejection"}
    assert takes["k_seq"] == {CHAIN, "iid"}
    assert {name for name, kinds in takes.items() if kinds == set(UNCOUPLED)} == {
        "deterministic", "match", "recursive", "rollback", "tolerance", "traversal", "typical"
    }  # fmt: skip
    assert takes["coupled"] == set(SIBLINGS)
    with pytest.raises(UserError) as error:
        accept.check_pair(tree("without_replacement"), load("k_seq"))
    assert str(error.value) == (
        "the rule k_seq takes drafts with siblings chain or iid, and draft_tree drafts "
        "without_replacement; rules for it are coupled, deterministic, match, recursive, rollback, "
        "tolerance, traversal, typical"
    )


@pytest.mark.parametrize("name", ["block", "chain", "lenient", "rejection"])
def test_a_tree_is_refused(name):
    with pytest.raises(UserError, match="takes chains"):
        load(name).sampled(*blocks(0, with_tree=True))
    with pytest.raises(UserError, match="rules for it are"):
        accept.check_pair(tree("iid"), load(name))


@pytest.mark.parametrize(
    ("rule", "keys", "message"),
    [
        ("lenient", {"lenience": 0.0}, "lenience is 0.0; it must be a number in (0, 1]"),
        ("lenient", {"upper": 1.5}, "upper is 1.5; it must be a number in (0, 1]"),
        ("typical", {"epsilon": 0.0}, "epsilon is 0.0; it must be a number in (0, 1)"),
        ("typical", {"delta": -1.0}, "delta is -1.0; it must be a number > 0"),
        ("rollback", {"threshold": -1.0}, "threshold is -1.0; it must be a number >= 0"),
        ("tolerance", {"top": 0}, "top is 0; it must be a whole number >= 1"),
        ("tolerance", {"gap": -1.0}, "gap is -1.0; it must be a number >= 0"),
        ("tolerance", {"top": 2, "gap": "a"}, "gap is 'a'; it must be a number >= 0"),
        ("tolerance", {"gap": 2.0}, "gap is 2.0 and top 1: only the best token passes"),
        ("typical", {"epsilon": 0.3}, "epsilon is 0.3 and delta 0.3: the threshold is never above"),
        ("chain", {"epsilon": 1}, "does not take the key 'epsilon'; it takes none"),
    ],
)
def test_bad_keys(rule, keys, message):
    with pytest.raises(UserError) as error:
        accept.load(rule, **keys)
    assert message in str(error.value)


def test_keys_that_are_not_given_are_not_refused():
    for rule, keys in (
        ("tolerance", {"top": 1, "least": 1}),
        ("tolerance", {"top": 2, "gap": 0.5}),
        ("typical", {"delta": 0.05}),
    ):
        assert accept.load(rule, **keys).name == rule


def test_an_unknown_rule_lists_the_rules():
    with pytest.raises(
        UserError,
        match="unknown acceptance rule 'chian'; it must be one of block, chain, coupled, determin",
    ):
        accept.load("chian")
