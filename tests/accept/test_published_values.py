"""The rules at single positions, by enumeration: published values, bounds, lossy distributions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import mutants
import numpy as np
import pytest
from marks import by_default
from mutants.drafters import with_draft

from specjax import accept, drafters, testing, theory
from specjax.accept import block, chain, k_seq
from specjax.drafters.draft_models import draft_tree
from specjax.types import Draft, ModelParams

# Enumeration runs each operation alone: on one worker each is compiled once for all these files.
pytestmark = [pytest.mark.fast, pytest.mark.xdist_group("enumeration")]
TARGET, DRAFT = testing.tabular(3), testing.tabular(3, "draft")
# Target and draft probabilities of one position.
P, Q = (0.5, 0.3, 0.2), (0.2, 0.7, 0.1)
TABLES = {
    "A": (P, Q),
    "B": ((0.05, 0.05, 0.9), (0.6, 0.3, 0.1)),
    "C": ((0.6, 0.4, 0.0), (0.5, 0.5, 0.0)),
}


def constant(probs, vocab=3):
    """The params of a tabular model with these probabilities after every text."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(probs, np.float64))
    return jnp.asarray(np.broadcast_to(logits, (vocab + 1, vocab, vocab)))


@functools.cache
def tree(shape, siblings):
    return draft_tree.make(TARGET, model=DRAFT, tree=shape, siblings=siblings)


def one():
    """A drafter of one token."""
    return tree("1", "iid")


def position(rule, drafter, target=P, draft=Q):
    """Every history of one round with constant probabilities."""
    with jax.enable_x64(True):
        params = ModelParams(constant(target), constant(draft))
        return testing.histories(TARGET, drafter, rule, params, [0, 1])


def emitted(rule, drafter, target=P, draft=Q):
    """The distribution of the first token that a round emits."""
    return position(rule, drafter, target, draft).first_token(3)


# One draft token.


def test_speculative_sampling_at_one_position():
    seen = position(accept.load("chain"), one())
    np.testing.assert_allclose(seen.first_token(3), P, atol=1e-15)
    assert seen.accepted == pytest.approx(0.6, abs=1e-15)
    seen = position(accept.load("rejection"), one())
    np.testing.assert_allclose(seen.first_token(3), P, atol=1e-15)
    assert seen.accepted == pytest.approx(0.4, abs=1e-15)


@pytest.mark.parametrize(
    ("lenience", "probs", "accepted", "ratio"),
    [
        (0.5, (3 / 11, 0.6, 1.4 / 11), 0.9, 2.0),
        pytest.param(0.3, (0.2, 0.7, 0.1), 1.0, 7 / 3, marks=pytest.mark.slow),
        pytest.param(0.1, (0.2, 0.7, 0.1), 1.0, 7 / 3, marks=pytest.mark.slow),
        (1.0, P, 0.6, 1.0),
    ],
)
def test_lenience(lenience, probs, accepted, ratio):
    seen = position(accept.load("lenient", lenience=lenience), one())
    np.testing.assert_allclose(seen.first_token(3), probs, atol=1e-14)
    assert seen.accepted == pytest.approx(accepted, abs=1e-14)
    assert (seen.first_token(3) / P).max() == pytest.approx(ratio, abs=1e-14)
    assert (seen.first_token(3) / P).max() <= 1 / lenience + 1e-12


@pytest.mark.slow
def test_lenience_bounds_every_distribution():
    """No token is emitted with more than 1 / (lenience * upper) times its probability."""
    rng = np.random.default_rng(0)
    for seed in range(6):
        target, draft = rng.dirichlet(np.ones(3), 2)
        for keys in ({"lenience": 0.6}, {"upper": 0.6}, {"lenience": 0.8, "upper": 0.5}):
            seen = position(accept.load("lenient", **keys), one(), target, draft)
            bound = 1 / np.prod(list(keys.values()))
            assert (seen.first_token(3) / target).max() <= bound + 1e-12, seed
            accepted = np.minimum(target * bound, draft).sum()
            assert seen.accepted == pytest.approx(accepted, abs=1e-12)


def test_upper_accepts_like_lenience_and_keeps_the_residual():
    probs = np.minimum(np.array(P) / 0.5, Q) + 0.1 * np.array([0.75, 0, 0.25])
    np.testing.assert_allclose(emitted(accept.load("lenient", upper=0.5), one()), probs, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("lenient", {"lenience": 0.5}),
        ("lenient", {"lenience": 0.8, "upper": 0.5}),
        ("typical", {"epsilon": 0.25}),
        ("rollback", {"threshold": 1.3}),
        ("tolerance", {"top": 2, "gap": 0.4}),
        ("tolerance", {"distance": 1}),
        ("tolerance", {"least": 1}),
    ],
)
def test_the_declared_law_is_the_enumerated_one(name, keys):
    """Against the enumerated law of the emitted token, for drawn and for given draft tokens."""
    rule = accept.load(name, **keys)
    assert rule.law is not None
    drafts = [(p, q) for p, q in TABLES.values()] + [(P, tuple(row)) for row in np.eye(3)]
    for target, draft in drafts:
        seen = emitted(rule, one(), target, draft)
        with jax.enable_x64(True):
            law = rule.law(*map(jnp.asarray, (target, draft, 1)))
        np.testing.assert_allclose(law, seen, atol=1e-12, err_msg=f"{target}, {draft}")


@pytest.mark.parametrize(
    ("name", "keys", "law"),
    [
        # Accepted with min(1, p / .5 q) = (1, .6 / .7, 1); the residual is (.4, 0, .15) / .55.
        ("lenient", {"lenience": 0.5}, (0.2 + 0.4 / 5.5, 0.6, 0.1 + 0.15 / 5.5)),
        # The tokens of probability .5 and .3 pass; .1 of the draws are rejected.
        ("typical", {"epsilon": 0.25, "delta": 1.0}, (0.25, 0.73, 0.02)),
        ("rollback", {"threshold": 1.3}, (0.25, 0.73, 0.02)),
        ("tolerance", {"top": 2}, (0.25, 0.73, 0.02)),
        # At depth 1 every token passes.
        ("tolerance", {"least": 1}, Q),
    ],
)
def test_the_law_that_a_lossy_rule_declares(name, keys, law):
    """By hand, at depth 1; at depth 2 ``least`` has no effect."""
    rule = accept.load(name, **keys)
    assert rule.law is not None
    probs = (jnp.broadcast_to(jnp.asarray(x), (2, 3)) for x in (P, Q))
    found = jax.jit(rule.law)(*probs, jnp.asarray([1, 2]))
    later = (0.2 + 0.8 * 0.5, 0.8 * 0.3, 0.8 * 0.2) if "least" in keys else law
    np.testing.assert_allclose(found, [law, later], atol=1e-6)


def test_wrong_rules_have_their_wrong_distributions():
    """The mutants are the published mistakes: their distributions have closed forms."""
    resample = mutants.named("match_then_resample").rule()
    for candidate, probs in enumerate([(0.75, 0.15, 0.1), (0.35, 0.51, 0.14), (0.4, 0.24, 0.36)]):
        certain = np.eye(3)[candidate]
        np.testing.assert_allclose(emitted(resample, one(), P, certain), probs, atol=1e-14)
    merged = mutants.named("equal_siblings_are_merged").rule()
    np.testing.assert_allclose(emitted(merged, tree("2", "iid")), (0.49, 0.30, 0.21), atol=1e-14)


def test_wrong_drafters_have_their_wrong_distributions():
    rule = accept.load("chain")

    def drop(draft, keys, context):
        """Drops a drawn token with a draft probability below .15."""
        mass = jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]
        return draft.replace(valid=mass >= 0.15)

    probs = emitted(rule, with_draft(drop)(one()))
    np.testing.assert_allclose(probs, (0.55, 0.33, 0.12), atol=1e-14)

    def declare(draft, keys, context):
        """Declares P, and draws from its two most probable tokens."""
        return draft.replace(probs=jnp.broadcast_to(jnp.asarray(P), draft.probs.shape))

    wrong = with_draft(declare)(one())
    probs = emitted(rule, wrong, (0.6, 0.4, 0.0), (0.625, 0.375, 0.0))
    np.testing.assert_allclose(probs, (0.625, 0.375, 0.0), atol=1e-14)
    # TriForce's middle model declares P, and replaces a rejected token by a draw from P, not from
    # the residual.
    middle = np.minimum(P, Q) + (1 - np.minimum(P, Q).sum()) * np.array(P)
    probs = emitted(rule, wrong, (0.4, 0.4, 0.2), middle)
    np.testing.assert_allclose(probs, (0.32, 0.50, 0.18), atol=1e-14)


# Several candidates for one position.

ACCEPTANCE = [  # table, k, i.i.d. recursive, without replacement, K-SEQ, its rho, optimal, top-k
    ("A", 2, 0.72, 0.9667, 0.75, 1.5, 0.81, 0.80),
    ("A", 3, 0.804, 1, 0.8466, 1.8219, 0.957, 1),
    ("B", 2, 0.28, 0.3732, 0.2846, 1.8458, 0.29, 0.10),
    ("B", 3, 0.352, 1, 0.3604, 2.6039, 0.371, 1),
    ("C", 2, 0.95, 1, 0.9766, 1.1531, 1, 1),
]


@pytest.mark.parametrize(
    ("name", "k", "iid", "distinct", "kseq", "rho", "optimal", "top"),
    by_default(ACCEPTANCE, ACCEPTANCE[:1]),
)
def test_acceptance_of_k_candidates(name, k, iid, distinct, kseq, rho, optimal, top):
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
        solved = k_seq.solve(jnp.asarray([k]), jnp.asarray([target]), jnp.asarray([draft]))
    assert round(float(solved[0]), 4) == rho
    assert round(float(theory.best_acceptance(target, draft, k)), 4) == optimal
    assert kseq <= optimal and iid <= optimal


@pytest.mark.slow
def test_acceptance_by_rank():
    """Without replacement the three children of table A are accepted with (.6, .3667, .0333)."""
    seen = position(accept.load("recursive"), tree("3", "without_replacement"))
    which = (np.asarray(seen.info.draft.tokens) == np.asarray(seen.info.tokens)[:, :1]).argmax(1)
    by_rank = np.bincount(which, seen.chance * (np.asarray(seen.info.accepted) > 0), 3)
    assert np.round(by_rank, 4).tolist() == [0.6, 0.3667, 0.0333]


@pytest.mark.slow
def test_k_seq_is_between_its_bounds():
    """SpecTr (2310.15141): (1 - 1/e) of the optimal transport <= K-SEQ <= the optimum."""
    rng = np.random.default_rng(1)
    for _ in range(4):
        target, draft = rng.dirichlet(np.ones(3), 2)
        best = theory.best_acceptance(target, draft, 3)
        seen = position(accept.load("k_seq"), tree("3", "iid"), target, draft).accepted
        assert (1 - 1 / np.e) * best - 1e-12 <= seen <= best + 1e-12


# Block verification.


@pytest.mark.parametrize(
    ("gamma", "token", "joint"),
    [
        pytest.param(1, 0.6667, 0.6667, marks=pytest.mark.slow),
        (2, 1.1111, 1.2222),
        pytest.param(3, 1.4074, 1.6667, marks=pytest.mark.slow),
        pytest.param(4, 1.6049, 2.0494, marks=pytest.mark.slow),
    ],
)
def test_block_on_two_tokens(gamma, token, joint):
    """Target (1/3, 2/3), draft (2/3, 1/3): the example of Sun et al. 2025 (2403.10444)."""
    two, other = testing.tabular(2), testing.tabular(2, "draft")
    drafter = drafters.make("draft_model", two, model=other, gamma=gamma)
    with jax.enable_x64(True):
        both = ModelParams(constant((1 / 3, 2 / 3), 2), constant((2 / 3, 1 / 3), 2))
        seen = {
            name: testing.histories(two, drafter, accept.load(name), both, [0, 1])
            for name in ("chain", "block", "traversal")
        }
    assert round(seen["chain"].accepted, 4) == token
    assert round(seen["block"].accepted, 4) == joint
    assert seen["traversal"].accepted == pytest.approx(seen["block"].accepted, abs=1e-14)
    for each in seen.values():
        np.testing.assert_allclose(each.first_token(2), (1 / 3, 2 / 3), atol=1e-14)


def test_block_never_accepts_less_than_chain():
    """On 1000 random chains, from the rules' own coins: the expected number of accepted tokens."""
    rows, gamma, vocab = 1000, 3, 3
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        target = jnp.asarray(rng.dirichlet(np.ones(vocab), (rows, gamma + 1)))
        probs = jnp.asarray(rng.dirichlet(np.ones(vocab), (rows, gamma)))
        totals = {"chain": 0, "block": 0}

        @jax.jit
        def masses(draft):
            joint = block.chances(draft, target, block.weights(draft, target))
            return chain.masses(draft, target), joint

        # The probabilities do not depend on the tokens: every path of a row has the same.
        for tokens in np.ndindex(*(vocab,) * gamma):
            ids = jnp.broadcast_to(jnp.asarray(tokens), (rows, gamma))
            draft = Draft(ids, jnp.ones((rows, gamma), bool), probs=probs)
            single, joint = jax.tree.map(np.asarray, masses(draft))
            weight = np.prod([np.asarray(probs[:, i, t]) for i, t in enumerate(tokens)], axis=0)
            chance = np.minimum(1, single[0] / single[1])
            totals["chain"] += weight * np.cumprod(chance, -1).sum(-1)
            miss = 1 - joint[0] / joint[1]
            # Some test passes at position i or later.
            at_least = 1 - np.cumprod(miss[:, ::-1], -1)[:, ::-1]
            totals["block"] += weight * at_least.sum(-1)
    assert (totals["block"] >= totals["chain"] - 1e-12).all()
    assert (totals["block"] > totals["chain"] + 1e-3).mean() > 0.5


# Lossy rules.


def test_distribution_of_typical_acceptance():
    """With a threshold of .09 every draft token is accepted: the output has the draft's probs."""
    np.testing.assert_allclose(emitted(accept.load("typical"), one()), Q, atol=1e-15)
    # Only .5 and .3 pass.
    strict = emitted(accept.load("typical", epsilon=0.25, delta=9.0), one())
    np.testing.assert_allclose(strict, np.array([0.2, 0.7, 0]) + 0.1 * np.array(P), atol=1e-15)
    accepted = [
        position(accept.load("typical", epsilon=e, delta=9.0), one()).accepted
        for e in (0.1, 0.25, 0.4, 0.6)
    ]
    assert accepted == sorted(accepted, reverse=True) and accepted[0] > accepted[-1]
