"""Trees from one list of probabilities per depth: DDTree's is optimal, JetSpec's is not."""

from __future__ import annotations

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import drafters_growth, drafters_growth_plans, drafters_keys

from specjax import rng, sampling
from specjax.drafters import growth
from specjax.errors import UserError
from specjax.topology import dynamic
from specjax.types import Context, ModelParams

pytestmark = pytest.mark.fast

VOCAB, DEPTH = 3, 3


def drafter_of(tree, nodes, depth=DEPTH, top_k=0, vocab=VOCAB):
    """A drafter whose parameters are the log-probabilities f[B,K,V] of the depths."""

    def begin(params, context, kept):
        return drafters_growth.Begun(params.draft[:, 0], kept, reads=params.draft)

    def step(params, reads, nodes, block):
        return reads[:, nodes.depth, None], nodes.tokens

    stepper = drafters_growth.Stepper(begin, step, independent=True)
    keys = drafters_keys.TreeKeys(tree=tree, nodes=nodes, top_k=top_k)
    plan = growth.read(
        drafters_growth_plans.Method("marginals", "", "top_k", vocab, depth, True), keys
    )
    return growth.build("marginals", stepper, plan, lambda key: {})


def paths_of(drafter, log_probs):
    """The nodes of the tree of each row as paths of tokens."""
    rows = len(log_probs)
    context = Context(
        jnp.zeros((rows, 2), jnp.int32), jnp.full((rows,), 2), sampling.make_sampling(rows)
    )
    state = growth.State(())
    propose = jax.jit(lambda params: drafter.propose(params, rng.row_keys(0, rows), context, state))
    draft = propose(ModelParams((), jnp.asarray(log_probs, jnp.float32)))[0]
    assert bool(draft.valid.all())
    trees = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert len(set(paths)) == len(paths)
        trees.append(paths)
    return trees


def expected_length(probs, tree) -> float:
    """The expected length of the accepted path, if the rows of ``probs`` [K,V] are independent."""
    return sum(np.prod([probs[d, token] for d, token in enumerate(path)]) for path in tree)


@functools.cache
def every_tree(vocab: int, depth: int, nodes: int) -> list[frozenset]:
    """All trees of so many nodes: sets of paths with all their prefixes."""
    trees = {frozenset()}
    for _ in range(nodes):
        trees = {
            tree | {(*path, token)}
            for tree in trees
            for path in ((), *tree)
            for token in range(vocab)
            if len(path) < depth and (*path, token) not in tree
        }
    return list(trees)


def jetspec(probs, nodes, top_k):
    """The published procedure: a heap; the popped node gets its ``top_k`` children."""
    tree, heap, order = [], [(-1.0, 0, ())], itertools.count(1)
    while len(tree) < nodes:
        score, _, path = heapq.heappop(heap)
        if len(path) == len(probs):
            continue
        for token in np.argsort(-probs[len(path)], kind="stable")[:top_k]:
            if len(tree) < nodes:
                own = (*path, int(token))
                tree.append(own)
                heapq.heappush(heap, (score * probs[len(path), token], next(order), own))
    return tree


@pytest.mark.parametrize(("nodes", "share"), [(1, 0.0), (4, 0.083), (6, 0.046)])
def test_best_first_is_optimal_and_best_parents_are_not(nodes, share):
    probs = np.random.default_rng(nodes).dirichlet(np.ones(VOCAB), (24, DEPTH))
    best = [
        max(expected_length(each, tree) for tree in every_tree(VOCAB, DEPTH, nodes))
        for each in probs
    ]
    ours, parents = (
        [expected_length(*pair) for pair in zip(probs, paths_of(own, np.log(probs)), strict=True)]
        for own in (drafter_of("best_first", nodes), drafter_of("best_parents", nodes, top_k=2))
    )
    np.testing.assert_allclose(ours, best, rtol=1e-5)
    # The mean share of the optimal expected length that the trees of JetSpec lose.
    lost = 1 - np.mean(np.array(parents) / best)
    assert (np.array(parents) <= np.array(best) * (1 + 1e-5)).all()
    assert abs(lost - share) < 1e-3


@pytest.mark.parametrize(
    ("nodes", "depth", "top_k"), [(1, 1, 1), (7, 3, 3), (12, 4, 2), (20, 5, 4)]
)
def test_best_parents_are_those_of_the_published_procedure(nodes, depth, top_k):
    probs = np.random.default_rng(nodes).dirichlet(np.ones(5), (8, depth))
    drafter = drafter_of("best_parents", nodes, depth, top_k, vocab=5)
    for each, tree in zip(probs, paths_of(drafter, np.log(probs)), strict=True):
        assert set(tree) == set(jetspec(each, nodes, top_k))


def test_levels():
    # Of 20 nodes, 4 children each: 5 parents, the pending token and at most 4, 3, 2, 1 in a level.
    assert dynamic.best_parents_levels(20, 9, 4) == ((4, 4), (3, 4), (2, 4), (1, 4), (0, 4))
    assert dynamic.best_parents_levels(20, 2, 4) == ((4, 4), (0, 4))
    assert dynamic.best_parents_levels(3, 5, 4) == ((0, 4),)


@pytest.mark.parametrize("tree", ["best_first", "best_parents"])
def test_errors(tree):
    with pytest.raises(UserError, match="ask for at most 14 nodes, or raise depth or top_k"):
        drafter_of(tree, 15, depth=3, top_k=2)
    with pytest.raises(UserError, match="top_k is 4 and the vocabulary has 3 tokens"):
        drafter_of(tree, 5, top_k=4)
    keys = drafters_keys.TreeKeys(tree=tree)
    with pytest.raises(UserError, match=f"tree='{tree}' needs one list per depth"):
        growth.read(drafters_growth_plans.Method("reader", "", "top_k", VOCAB, DEPTH), keys)
