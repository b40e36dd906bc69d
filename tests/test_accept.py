"""The rules by exact enumeration in float64, and the mutants that the enumeration must kill."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, testing
from specjax.accept import chain
from specjax.errors import UserError
from specjax.rng import RowKeys, row_keys
from specjax.types import Draft

pytestmark = pytest.mark.fast
V, GAMMA = 3, 3


def laws(seed, sparse=False):
    """A random law for every prefix."""
    tables = {}

    def law(prefix):
        if prefix not in tables:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            p = rng.dirichlet(np.ones(V))
            if sparse:
                p = p * (rng.random(V) < 0.6) + 1e-300
                p[p < 1e-200] = 0
                p = p / p.sum() if p.sum() else np.eye(V)[rng.integers(V)]
            tables[prefix] = p
        return tables[prefix]

    return law


def error(resolve, seed, sparse=False, claimed=None):
    target, draft = laws(seed, sparse), laws(seed + 1000, sparse)
    with jax.enable_x64(True):
        law = testing.enumerate_chain(chain.coins, resolve, draft, target, V, GAMMA)
    assert abs(law.sum() - 1) < 1e-12
    return testing.total_variation(law, testing.joint_law(target, V, GAMMA + 1))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_chain_rule_is_exact(seed, sparse):
    assert error(chain.resolve, seed, sparse) < 1e-12


def resample_from_target(kept, draft, target_probs):
    accepted, _ = chain.resolve(kept, draft, target_probs)
    return accepted, jnp.take_along_axis(target_probs, accepted[:, None, None], 1)[:, 0]


def residual_after_everything(kept, draft, target_probs):
    """Takes the residual of the last node even when all were accepted."""
    accepted, law = chain.resolve(kept, draft, target_probs)
    full = (accepted == draft.tokens.shape[1])[:, None]
    return accepted, jnp.where(full, jnp.maximum(target_probs[:, -1] - draft.probs[:, -1], 0) + 1e-9, law)


def go_on_after_a_rejection(kept, draft, target_probs):
    """Takes the last success instead of stopping at the first failure."""
    index = jnp.arange(1, kept.shape[1] + 1)
    accepted = jnp.max(jnp.where(kept, index, 0), -1)
    prefix = jnp.arange(kept.shape[1]) < accepted[:, None]
    return accepted, chain.resolve(prefix, draft, target_probs)[1]


def test_mutants_of_the_chain_rule_die():
    for mutant in (resample_from_target, residual_after_everything, go_on_after_a_rejection):
        worst = max(error(mutant, seed) for seed in range(3))
        assert worst > 1e-3, mutant.__name__


def test_single_position_table():
    """Card F2: target (.5, .3, .2), draft (.2, .7, .1): acceptance .6 and the target's law."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    with jax.enable_x64(True):
        law = testing.enumerate_chain(chain.coins, chain.resolve, lambda _: q, lambda _: p, 3, 1)
        mutant = testing.enumerate_chain(chain.coins, resample_from_target, lambda _: q, lambda _: p, 3, 1)
    np.testing.assert_allclose(law.sum(1), p, atol=1e-15)
    assert abs(np.minimum(p, q).sum() - 0.6) < 1e-15
    np.testing.assert_allclose(mutant.sum(1), np.minimum(p, q) + 0.4 * p, atol=1e-15)  # card A2: TV .154 on its toy


def block(seed, rows, deterministic=False):
    rng = np.random.default_rng(seed)
    probs = jnp.asarray(rng.dirichlet(np.ones(V), (rows, GAMMA)), jnp.float32)
    draft = Draft(
        tokens=jnp.asarray(rng.integers(0, V, (rows, GAMMA)), jnp.int32),
        valid=jnp.asarray(rng.random((rows, GAMMA)) < 0.8),
        probs=None if deterministic else probs,
    )
    target = jnp.asarray(rng.dirichlet(np.ones(V), (rows, GAMMA + 1)), jnp.float32)
    keys = RowKeys(row_keys(seed, rows), jnp.asarray(3), jnp.full((rows,), 9))
    return keys, draft, target


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", accept.names())
def test_verdicts_are_well_formed(name, deterministic):
    keys, draft, target = block(0, 500, deterministic)
    verdict = jax.jit(accept.load(name).sampled)(keys, draft, target)
    for row in range(500):
        count, tokens, path = int(verdict.count[row]), verdict.tokens[row], verdict.path[row]
        usable = int(np.cumprod(draft.valid[row]).sum())
        assert 1 <= count <= usable + 1
        assert path.tolist() == [*range(count - 1), *[-1] * (GAMMA - count + 1)]
        assert tokens[: count - 1].tolist() == draft.tokens[row, : count - 1].tolist()
        assert 0 <= tokens[count - 1] < V and (tokens[count:] == -1).all()


@pytest.mark.parametrize("name", accept.names())
def test_a_one_hot_target_gives_the_greedy_verdict(name):
    keys, draft, target = block(1, 500)
    best = jnp.argmax(target, -1).astype(jnp.int32)
    rule = accept.load(name)
    sampled = rule.sampled(keys, draft, jax.nn.one_hot(best, V))
    greedy = rule.greedy(draft, best)
    jax.tree.map(np.testing.assert_array_equal, sampled, greedy)


@pytest.mark.parametrize("name", accept.names())
def test_a_deterministic_draft_keeps_the_law(name):
    """One-hot drafts: the emitted first token has the target's law, whatever was proposed."""
    rows = 200_000
    p = np.array([0.5, 0.3, 0.2])
    target = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (rows, 2, V))
    draft = Draft(tokens=jnp.full((rows, 1), 1), valid=jnp.ones((rows, 1), bool))
    keys = RowKeys(row_keys(0, rows), jnp.asarray(0), jnp.zeros((rows,), jnp.int32))
    tokens = np.asarray(accept.load(name).sampled(keys, draft, target).tokens[:, 0])
    assert testing.chi_square(np.bincount(tokens, minlength=V), p)[2] > 1e-3


def test_vanishing_residual_falls_back_to_the_target():
    p = jnp.asarray([[[0.5, 0.3, 0.2]] * 2], jnp.float32)
    draft = Draft(jnp.asarray([[0]]), jnp.asarray([[True]]), probs=p[:, :1])
    accepted, law = chain.resolve(jnp.asarray([[False]]), draft, p)
    assert int(accepted[0]) == 0
    np.testing.assert_array_equal(law, p[:, 0])


@pytest.mark.parametrize("name", accept.names())
def test_a_tree_is_refused(name):
    keys, draft, target = block(2, 4)
    with pytest.raises(UserError, match="takes chains"):
        accept.load(name).sampled(keys, draft.replace(parents=jnp.zeros((4, GAMMA), jnp.int32) - 1), target)


def test_unknown_rule_lists_what_there_is():
    with pytest.raises(UserError, match="unknown acceptance rule 'chian'; there is chain, match"):
        accept.load("chian")
    with pytest.raises(UserError, match="does not take the key 'epsilon'; it takes none"):
        accept.load("chain", epsilon=1)
