"""Dynamic trees: expansion and reranking of pools against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import UserError
from specjax.topology import dynamic

pytestmark = pytest.mark.fast


def test_expand():
    rng = np.random.default_rng(0)
    scores = -rng.exponential(size=(3, 4)).astype(np.float32)
    scores[0, 1] = -np.inf
    log_probs = np.log(rng.dirichlet(np.ones(9), (3, 4))).astype(np.float32)
    tokens, total, parent = jax.jit(dynamic.expand, static_argnums=2)(scores, log_probs, 5)
    assert tokens.dtype == parent.dtype == jnp.int32 and total.dtype == jnp.float32
    assert tokens.shape == total.shape == parent.shape == (3, 20)
    order = np.argsort(-log_probs, axis=-1)[..., :5]
    np.testing.assert_array_equal(tokens, order.reshape(3, 20))
    expected = scores[..., None] + np.take_along_axis(log_probs, order, -1)
    np.testing.assert_array_equal(total, expected.reshape(3, 20))
    np.testing.assert_array_equal(parent, np.tile(np.repeat(np.arange(4), 5), (3, 1)))


def test_children_that_cannot_be_among_the_best_are_left_out():
    """With the same probabilities after every node of an ordered frontier."""
    rng, most = np.random.default_rng(0), 9
    scores = -np.sort(rng.exponential(size=(20, 6)).astype(np.float32), axis=-1)
    scores[:4] = np.round(scores[:4])  # ties
    log_probs = np.log(rng.dirichlet(np.ones(7), (20, 1))).astype(np.float32)
    every = dynamic.expand(scores, jnp.asarray(log_probs), 7)
    few = dynamic.expand(scores, jnp.asarray(log_probs), 7, most)
    assert few[0].shape[1] == len(dynamic.candidates(6, 7, most)) < every[0].shape[1] == 42
    best = [dynamic.frontier(total, most) for _, total, _ in (every, few)]
    for ours, right in zip(few, every, strict=True):
        np.testing.assert_array_equal(
            np.take_along_axis(np.asarray(ours), best[1], 1),
            np.take_along_axis(np.asarray(right), best[0], 1),
        )


def test_frontier():
    total = jnp.asarray([[-2.0, -1.0, -1.0, -np.inf], [-0.0, 0.0, np.nan, -0.0]])
    np.testing.assert_array_equal(dynamic.frontier(total, 3), [[1, 2, 0], [0, 1, 3]])
    got = jax.jit(dynamic.frontier, static_argnums=1)(jnp.full((2, 6), -jnp.inf), 4)
    np.testing.assert_array_equal(got, [[0, 1, 2, 3]] * 2)
    assert got.dtype == jnp.int32


def pool(rng, size, kind):
    """A random tree with non-increasing scores; ``kind`` is the difficulty in them."""
    parents = [int(rng.integers(-1, node)) for node in range(size)]
    steps = {
        "plain": lambda: -rng.exponential(),
        "ties": lambda: -float(rng.integers(0, 2)),
        "all equal": lambda: 0.0,
        "signed zeros": lambda: float(rng.choice([-0.0, 0.0])),
        "-inf": lambda: -np.inf if rng.random() < 0.4 else -float(rng.integers(0, 2)),
        "nan": lambda: np.nan if rng.random() < 0.2 else -float(rng.integers(0, 2)),
    }
    total = np.zeros(size, np.float32)
    for node, parent in enumerate(parents):
        above = total[parent] if parent >= 0 else np.float32(-0.0)
        total[node] = np.float32(steps[kind]()) + above
    return total, parents


@pytest.mark.parametrize("kind", ["plain", "ties", "all equal", "signed zeros", "-inf", "nan"])
def test_rerank(kind):
    rng = np.random.default_rng(1)
    rerank = jax.jit(dynamic.rerank, static_argnums=2)
    for nodes in (1, 7, 24):
        rows = [pool(rng, 24, kind) for _ in range(40)]
        total = np.stack([row[0] for row in rows])
        parents = np.array([row[1] for row in rows], np.int32)
        chosen, remapped = rerank(total, parents, nodes)
        assert chosen.dtype == remapped.dtype == jnp.int32
        assert chosen.shape == remapped.shape == (40, nodes)
        for row in range(40):
            scores = [-np.inf if np.isnan(x) else float(x) for x in total[row]]
            expected = sorted(sorted(range(24), key=lambda node: (-scores[node], node))[:nodes])
            assert chosen[row].tolist() == expected
            # Closed under ancestors.
            assert all(parents[row][node] in (-1, *expected) for node in expected)
            places = [
                expected.index(parents[row][node]) if parents[row][node] >= 0 else -1
                for node in expected
            ]
            assert remapped[row].tolist() == places
            assert all(place < node for node, place in enumerate(places))


def test_expand_and_rerank_make_a_tree():
    """Two levels, as in a drafter, with probabilities of exactly 1 and 0: all scores tie."""
    log_probs = jnp.where(jnp.arange(8) < 1, 0.0, -jnp.inf)
    tokens, total, _ = dynamic.expand(jnp.zeros((1, 1)), jnp.broadcast_to(log_probs, (1, 1, 8)), 3)
    best = dynamic.frontier(total, 3)
    scores = jnp.take_along_axis(total, best, 1)
    below, more, parent = dynamic.expand(scores, jnp.broadcast_to(log_probs, (1, 3, 8)), 3)
    parents = jnp.concatenate([jnp.full((1, 3), -1), jnp.take_along_axis(best, parent, 1)], 1)
    chosen, remapped = dynamic.rerank(jnp.concatenate([total, more], 1), parents, 4)
    assert chosen.tolist() == [[0, 1, 2, 3]] and remapped.tolist() == [[-1, -1, -1, 0]]
    assert jnp.concatenate([tokens, below], 1)[0, chosen[0]].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dynamic.expand(jnp.zeros((1, 1)), jnp.zeros((1, 1, 3)), 4), "top_k is 4"),
        (lambda: dynamic.frontier(jnp.zeros((1, 3)), 4), "k is 4"),
        (lambda: dynamic.rerank(jnp.zeros((1, 3)), jnp.zeros((1, 3), jnp.int32), 4), "nodes is 4"),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError, match=f"{message} and .*; give at most 3"):
        call()
