"""The rules on single positions: published tables to all their digits, bounds, degenerate drafts, admissible pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, drafters, testing
from specjax.accept import block, chain, k_seq, traversal
from specjax.drafters.draft_models import draft_tree
from specjax.errors import UserError
from specjax.rng import RowKeys, row_keys
from specjax.testing import mutants
from specjax.types import CHAIN, SIBLINGS, Draft, ModelParams

pytestmark = pytest.mark.fast
V, GAMMA = 3, 3
TARGET, DRAFT = testing.tabular(3), testing.tabular(3, "draft")
P, Q = (0.5, 0.3, 0.2), (0.2, 0.7, 0.1)  # the card's position; tables A, B, C below
TABLES = {
    "A": (P, Q),
    "B": ((0.05, 0.05, 0.9), (0.6, 0.3, 0.1)),
    "C": ((0.6, 0.4, 0.0), (0.5, 0.5, 0.0)),
}


def constant(law, vocab=3):
    """A table that says ``law`` whatever came before."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(law, np.float64))
    return jnp.asarray(np.broadcast_to(logits, (vocab + 1, vocab, vocab)))


SHAPES = {}


def tree(shape, siblings):
    key = shape, siblings
    if key not in SHAPES:
        SHAPES[key] = draft_tree.make(TARGET, model=DRAFT, tree=shape, siblings=siblings)
    return SHAPES[key]


def position(rule, drafter, target=P, draft=Q):
    """Every history of one round on constant laws."""
    with jax.enable_x64(True):
        return testing.histories(
            TARGET, drafter, rule, ModelParams(constant(target), constant(draft)), [0, 1]
        )


def emitted(rule, drafter, target=P, draft=Q):
    return position(rule, drafter, target, draft).first_token(3)


# Card F2: one position, target (.5, .3, .2), draft (.2, .7, .1).


def one():
    return tree("1", "iid")


def test_speculative_sampling_on_the_card_position():
    seen = position(accept.load("chain"), one())
    np.testing.assert_allclose(seen.first_token(3), P, atol=1e-15)
    assert seen.accepted == pytest.approx(0.6, abs=1e-15)
    assert position(accept.load("rejection"), one()).accepted == pytest.approx(0.4, abs=1e-15)
    np.testing.assert_allclose(emitted(accept.load("rejection"), one()), P, atol=1e-15)


@pytest.mark.parametrize(
    ("lenience", "law", "accepted", "ratio"),
    [
        (0.5, (3 / 11, 0.6, 1.4 / 11), 0.9, 2.0),
        (0.3, (0.2, 0.7, 0.1), 1.0, 7 / 3),
        (0.1, (0.2, 0.7, 0.1), 1.0, 7 / 3),
        (1.0, P, 0.6, 1.0),
    ],
)
def test_lenience_table(lenience, law, accepted, ratio):
    seen = position(accept.load("lenient", lenience=lenience), one())
    np.testing.assert_allclose(seen.first_token(3), law, atol=1e-14)
    assert np.round(seen.first_token(3), 4).tolist() == np.round(law, 4).tolist()
    assert seen.accepted == pytest.approx(accepted, abs=1e-14)
    assert (seen.first_token(3) / P).max() == pytest.approx(ratio, abs=1e-14)
    assert (seen.first_token(3) / P).max() <= 1 / lenience + 1e-12


def test_lenience_bounds_every_law():
    """No token comes out with more than 1 / (lenience * upper) times its probability, in either spelling."""
    rng = np.random.default_rng(0)
    for seed in range(6):
        target, draft = rng.dirichlet(np.ones(3), 2)
        for keys in ({"lenience": 0.6}, {"upper": 0.6}, {"lenience": 0.8, "upper": 0.5}):
            rule = accept.load("lenient", **keys)
            seen = position(rule, one(), target, draft)
            bound = 1 / np.prod(list(keys.values()))
            assert (seen.first_token(3) / target).max() <= bound + 1e-12, seed
            assert seen.accepted == pytest.approx(
                np.minimum(target * bound, draft).sum(), abs=1e-12
            )


def test_the_other_spelling_of_lenience():
    """r ~ U[0, b] accepts like lenience b and keeps the residual max(target - draft, 0)."""
    law = np.minimum(np.array(P) / 0.5, Q) + 0.1 * np.array([0.75, 0, 0.25])
    np.testing.assert_allclose(emitted(accept.load("lenient", upper=0.5), one()), law, atol=1e-14)


def test_wrong_variants_have_the_laws_of_the_card():
    """Each is what the card says it is: the mutants are the published mistakes, not strawmen."""
    by_name = {m.name: m for m in mutants.MUTANTS}
    resample = by_name["match_then_resample"].rule()
    for candidate, law in enumerate([(0.75, 0.15, 0.1), (0.35, 0.51, 0.14), (0.4, 0.24, 0.36)]):
        certain = np.eye(3)[candidate]
        np.testing.assert_allclose(emitted(resample, one(), P, certain), law, atol=1e-14)
    merged = by_name["equal_siblings_are_merged"].rule()
    np.testing.assert_allclose(emitted(merged, tree("2", "iid")), (0.49, 0.30, 0.21), atol=1e-14)

    def drop(
        draft, keys, context
    ):  # drops a token whose draft probability is below .15, then the target samples there
        mass = jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]
        return draft.replace(valid=mass >= 0.15)

    dropping = mutants.with_draft(drop)(one())
    np.testing.assert_allclose(
        emitted(accept.load("chain"), dropping), (0.55, 0.33, 0.12), atol=1e-14
    )

    def claim(draft, keys, context):  # claims (.5, .3, .2), draws from its top two
        return draft.replace(probs=jnp.broadcast_to(jnp.asarray(P), draft.probs.shape))

    claiming = mutants.with_draft(claim)(one())
    law = emitted(accept.load("chain"), claiming, (0.6, 0.4, 0.0), (0.625, 0.375, 0.0))
    np.testing.assert_allclose(law, (0.625, 0.375, 0.0), atol=1e-14)
    # TriForce's middle model says (.5, .3, .2) and replaces what it rejects by a draw of its own, not by its residual.
    middle = np.minimum(P, Q) + (1 - np.minimum(P, Q).sum()) * np.array(P)
    law = emitted(accept.load("chain"), claiming, (0.4, 0.4, 0.2), middle)
    np.testing.assert_allclose(law, (0.32, 0.50, 0.18), atol=1e-14)


# Card F3: acceptance of k candidates for one place.

ACCEPTANCE = [  # table, k, i.i.d. recursive, without replacement, K-SEQ, its rho, optimal transport, top-k
    ("A", 2, 0.72, 0.9667, 0.75, 1.5, 0.81, 0.80),
    ("A", 3, 0.804, 1, 0.8466, 1.8219, 0.957, 1),
    ("B", 2, 0.28, 0.3732, 0.2846, 1.8458, 0.29, 0.10),
    ("B", 3, 0.352, 1, 0.3604, 2.6039, 0.371, 1),
    ("C", 2, 0.95, 1, 0.9766, 1.1531, 1, 1),
]


@pytest.mark.parametrize(
    ("name", "k", "iid", "distinct", "kseq", "rho", "optimal", "top"), ACCEPTANCE
)
def test_multi_candidate_table(name, k, iid, distinct, kseq, rho, optimal, top):
    target, draft = TABLES[name]

    def accepted(rule, siblings):
        seen = position(accept.load(rule), tree(str(k), siblings), target, draft)
        np.testing.assert_allclose(seen.first_token(3), target, atol=1e-14)
        return round(seen.accepted, 4)

    assert accepted("recursive", "iid") == iid
    assert accepted("recursive", "without_replacement") == distinct
    assert accepted("k_seq", "iid") == kseq
    assert accepted("deterministic", "top_k") == top
    with jax.enable_x64(True):
        found = k_seq.solve(jnp.asarray([k]), jnp.asarray([target]), jnp.asarray([draft]))
    assert round(float(found[0]), 4) == rho
    assert round(testing.best_acceptance(np.array(target), np.array(draft), k), 4) == optimal
    assert kseq <= optimal and iid <= optimal


def test_acceptance_by_rank():
    """Card B3: without replacement the three children of table A stand with (.6, .3667, .0333)."""
    seen = position(accept.load("recursive"), tree("3", "without_replacement"))
    which = (np.asarray(seen.info.draft.tokens) == np.asarray(seen.info.tokens)[:, :1]).argmax(1)
    by_rank = np.bincount(which, seen.chance * (np.asarray(seen.info.accepted) > 0), 3)
    assert np.round(by_rank, 4).tolist() == [0.6, 0.3667, 0.0333]


def test_k_seq_is_never_above_optimal_transport():
    """Card B4's toy D is not given; on random laws: 1 - 1/e of the optimum <= K-SEQ <= the optimum."""
    rng = np.random.default_rng(1)
    for _ in range(4):
        target, draft = rng.dirichlet(np.ones(3), 2)
        best = testing.best_acceptance(target, draft, 3)
        seen = position(accept.load("k_seq"), tree("3", "iid"), target, draft).accepted
        assert (1 - 1 / np.e) * best - 1e-12 <= seen <= best + 1e-12


# Card F4: block verification on target (1/3, 2/3), draft (2/3, 1/3).


@pytest.mark.parametrize(
    ("gamma", "token", "joint"),
    [(1, 0.6667, 0.6667), (2, 1.1111, 1.2222), (3, 1.4074, 1.6667), (4, 1.6049, 2.0494)],
)
def test_block_toy(gamma, token, joint):
    two, other = testing.tabular(2), testing.tabular(2, "draft")
    drafter = drafters.make("draft_model", two, model=other, gamma=gamma)
    with jax.enable_x64(True):
        both = ModelParams(constant((1 / 3, 2 / 3), 2), constant((2 / 3, 1 / 3), 2))
        seen = {
            r: testing.histories(two, drafter, accept.load(r), both, [0, 1])
            for r in ("chain", "block", "traversal")
        }
    assert round(seen["chain"].accepted, 4) == token
    assert round(seen["block"].accepted, 4) == joint
    assert seen["traversal"].accepted == pytest.approx(seen["block"].accepted, abs=1e-14)
    for each in seen.values():
        np.testing.assert_allclose(each.first_token(2), (1 / 3, 2 / 3), atol=1e-14)


def test_block_never_accepts_less_than_tokens():
    """On 1000 random chains, by the rules' own coins: expected length of block >= token-wise."""
    rows, gamma, vocab = 1000, 3, 3
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        target = jnp.asarray(rng.dirichlet(np.ones(vocab), (rows, gamma + 1)))
        laws = jnp.asarray(rng.dirichlet(np.ones(vocab), (rows, gamma)))
        totals = {"chain": 0, "block": 0}
        for tokens in np.ndindex(
            *(vocab,) * gamma
        ):  # context-free in each row: every path has the same laws
            draft = Draft(
                jnp.broadcast_to(jnp.asarray(tokens), (rows, gamma)),
                jnp.ones((rows, gamma), bool),
                probs=laws,
            )
            weight = np.prod([np.asarray(laws[:, i, t]) for i, t in enumerate(tokens)], axis=0)
            kept, total = chain.masses(draft, target)
            totals["chain"] += weight * np.cumprod(np.minimum(1, kept / total), -1).sum(-1)
            kept, total = block.chances(draft, target, block.weights(draft, target))
            miss = 1 - np.asarray(kept / total)
            at_least = 1 - np.cumprod(miss[:, ::-1], -1)[:, ::-1]  # some success at i or later
            totals["block"] += weight * at_least.sum(-1)
    assert (totals["block"] >= totals["chain"] - 1e-12).all()
    assert (totals["block"] > totals["chain"] + 1e-3).mean() > 0.5


# Lossy rules.


def test_typical_acceptance_has_the_law_it_should():
    """Card A6: with a threshold of .09 every token of the toy stands: the emitted law is the draft's."""
    np.testing.assert_allclose(emitted(accept.load("typical"), one()), Q, atol=1e-15)
    strict = emitted(accept.load("typical", epsilon=0.25, delta=9.0), one())  # only .5 and .3 stand
    np.testing.assert_allclose(strict, np.array([0.2, 0.7, 0]) + 0.1 * np.array(P), atol=1e-15)
    accepted = [
        position(accept.load("typical", epsilon=e, delta=9.0), one()).accepted
        for e in (0.1, 0.25, 0.4, 0.6)
    ]
    assert accepted == sorted(accepted, reverse=True) and accepted[0] > accepted[-1]


def test_tolerance_of_blockwise_decoding_and_specdec():
    logits = jnp.asarray([[[0.0, 3.0, 2.0, 1.0]] * 4])

    def length(tokens, **keys):
        draft = Draft(jnp.asarray([tokens]), jnp.ones((1, 3), bool))
        verdict = accept.load("tolerance", **keys).greedy(draft, logits)
        assert int(verdict.tokens[0, int(verdict.count[0]) - 1]) == 1  # then the target's best
        return int(verdict.count[0]) - 1

    assert length([1, 1, 2]) == 2
    assert length([1, 2, 3], top=2) == 2 and length([1, 2, 3], top=3) == 3
    assert length([1, 2, 3], top=4, gap=1.0) == 2 and length([1, 2, 3], top=4, gap=2.0) == 3
    assert length([2, 0, 3], distance=1) == 2
    assert length([0, 0, 1], least=1) == 1 and length([0, 0, 1], least=2) == 3


def test_lenience_at_temperature_zero_looks_at_probabilities():
    logits = jnp.log(jnp.asarray([[[0.5, 0.3, 0.2]] * 3]))
    draft = Draft(jnp.asarray([[1, 2]]), jnp.ones((1, 2), bool))
    counts = [
        int(accept.load("lenient", lenience=x).greedy(draft, logits).count[0]) - 1
        for x in (1.0, 0.61, 0.59, 0.39)
    ]
    assert counts == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("rule", "keys", "message"),
    [
        ("lenient", {"lenience": 0.0}, "lenience is 0.0; it must be in (0, 1]"),
        ("lenient", {"upper": 1.5}, "upper is 1.5; it must be in (0, 1]"),
        ("typical", {"epsilon": 0.0}, "epsilon is 0.0"),
        ("typical", {"delta": -1.0}, "delta is -1.0"),
        ("tolerance", {"top": 0}, "top is 0; it must be at least 1"),
        ("tolerance", {"gap": -1.0}, "gap is -1.0"),
        ("chain", {"epsilon": 1}, "does not take the key 'epsilon'; it takes none"),
    ],
)
def test_bad_keys(rule, keys, message):
    with pytest.raises(UserError) as error:
        accept.load(rule, **keys)
    assert message in str(error.value)


# Form.


def a_block(seed, rows, deterministic=False, with_tree=False):
    rng = np.random.default_rng(seed)
    probs = jnp.asarray(rng.dirichlet(np.ones(V), (rows, 5 if with_tree else GAMMA)), jnp.float32)
    size = probs.shape[1]
    draft = Draft(
        tokens=jnp.asarray(rng.integers(0, V, (rows, size)), jnp.int32),
        valid=jnp.asarray(rng.random((rows, size)) < 0.8),
        parents=jnp.broadcast_to(jnp.asarray([-1, -1, 0, 0, 2]), (rows, 5)) if with_tree else None,
        probs=None if deterministic else probs,
        depth=3 if with_tree else None,
    )
    target = jnp.asarray(rng.dirichlet(np.ones(V), (rows, size + 1)), jnp.float32)
    return RowKeys(row_keys(seed, rows), jnp.asarray(3), jnp.full((rows,), 9)), draft, target


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", accept.names())
def test_verdicts_are_well_formed(name, deterministic):
    rule = accept.load(name)
    for with_tree in (False, True):
        if with_tree and rule.siblings == (CHAIN,):
            continue
        keys, draft, target = a_block(0, 300, deterministic, with_tree)
        verdict = jax.tree.map(np.asarray, jax.jit(rule.sampled)(keys, draft, target))
        parents = (
            np.asarray(draft.parents)
            if with_tree
            else np.broadcast_to(np.arange(GAMMA) - 1, (300, GAMMA))
        )
        tokens, valid = np.asarray(draft.tokens), np.asarray(draft.valid)
        for row in range(300):
            count, path = int(verdict.count[row]), verdict.path[row]
            kept = path[path >= 0]
            assert len(kept) == count - 1 and (path[count - 1 :] == -1).all()
            for above, node in zip([-1, *kept], kept, strict=False):
                assert valid[row, node]
                here = parents[
                    row, node
                ]  # a copy of the parent will do, where siblings are independent
                assert here == above or (
                    above >= 0 and here >= 0 and tokens[row, here] == tokens[row, above]
                )
            assert verdict.tokens[row, : count - 1].tolist() == tokens[row, kept].tolist()
            assert (
                0 <= verdict.tokens[row, count - 1] < V
                and (verdict.tokens[row, count:] == -1).all()
            )


@pytest.mark.parametrize("name", accept.names())
def test_a_one_hot_target_gives_the_greedy_verdict(name):
    rule = accept.load(name)
    for with_tree in (False, True):
        if with_tree and rule.siblings == (CHAIN,):
            continue
        keys, draft, target = a_block(1, 300, with_tree=with_tree)
        best = jnp.argmax(target, -1)
        sampled = rule.sampled(keys, draft, jax.nn.one_hot(best, V))
        greedy = rule.greedy(draft, jnp.log(target))
        np.testing.assert_array_equal(sampled.count, greedy.count)
        np.testing.assert_array_equal(sampled.tokens, greedy.tokens)


@pytest.mark.parametrize(
    "name", [n for n in accept.names() if accept.load(n).lossless_class == "L1"]
)
def test_a_deterministic_draft_keeps_the_law(name):
    """One-hot drafts: the emitted first token has the target's law, whatever was proposed."""
    rows = 100_000
    target = jnp.broadcast_to(jnp.asarray(P, jnp.float32), (rows, 2, V))
    draft = Draft(tokens=jnp.full((rows, 1), 1), valid=jnp.ones((rows, 1), bool))
    keys = RowKeys(row_keys(0, rows), jnp.asarray(0), jnp.zeros((rows,), jnp.int32))
    tokens = np.asarray(accept.load(name).sampled(keys, draft, target).tokens[:, 0])
    assert testing.chi_square(np.bincount(tokens, minlength=V), np.array(P))[2] > 1e-3


def test_vanishing_residual_falls_back_to_the_target():
    p = jnp.asarray([[[0.5, 0.3, 0.2]] * 2], jnp.float32)
    draft = Draft(jnp.asarray([[0]]), jnp.asarray([[True]]), probs=p[:, :1])
    np.testing.assert_array_equal(chain.leftover(jnp.asarray([0]), draft, p), p[:, 0])


def test_small_residuals_do_not_drown_in_float32():
    """Draft and target that differ by a millionth: what is owed is small, and 1 - weight may be exactly 0."""
    law = jnp.asarray([[0.3, 0.3, 0.4]], jnp.float32)
    near = law + jnp.asarray([[1e-6, -1e-6, 0]], jnp.float32)
    weight, left = traversal.reject_child(jnp.ones((1,), jnp.float32), law, near)
    assert float(weight[0]) == 1.0  # the root always stands
    np.testing.assert_allclose(left, [[0, 1, 0]], atol=1e-6)
    draft = Draft(jnp.asarray([[0, 0]]), jnp.ones((1, 2), bool), probs=jnp.stack([law, near], 1))
    kept, total = block.chances(draft, jnp.stack([law] * 3, 1), jnp.ones((1, 3), jnp.float32))
    assert (
        float(kept[0, 0]) == float(total[0, 0]) > 0
    )  # the first token was accepted for sure: so it stands


# Pairs.


def test_admissible_pairs():
    """A rule takes exactly the kinds for which its class holds; the message names the rules that would do."""
    takes = {name: set(accept.load(name).siblings) for name in accept.names()}
    assert {n for n, kinds in takes.items() if kinds == {CHAIN}} == {
        "block",
        "chain",
        "lenient",
        "rejection",
    }
    assert takes["k_seq"] == {CHAIN, "iid"}
    assert {n for n, kinds in takes.items() if kinds == set(SIBLINGS)} == {
        "deterministic", "match", "recursive", "tolerance", "traversal", "typical"
    }  # fmt: skip
    with pytest.raises(UserError) as error:
        accept.check_pair(tree("2", "without_replacement"), accept.load("k_seq"))
    assert str(error.value) == (
        "the rule k_seq takes drafts whose siblings are chain or iid, and draft_tree drafts without_replacement; "
        "rules for it are deterministic, match, recursive, tolerance, traversal, typical"
    )


@pytest.mark.parametrize("name", ["block", "chain", "lenient", "rejection"])
def test_a_tree_is_refused(name):
    keys, draft, target = a_block(2, 4, with_tree=True)
    with pytest.raises(UserError, match="takes chains"):
        accept.load(name).sampled(keys, draft, target)
    with pytest.raises(UserError, match="rules for it are"):
        accept.check_pair(tree("2", "iid"), accept.load(name))


def test_unknown_rule_lists_what_there_is():
    with pytest.raises(
        UserError, match="unknown acceptance rule 'chian'; there is block, chain, deterministic"
    ):
        accept.load("chian")
