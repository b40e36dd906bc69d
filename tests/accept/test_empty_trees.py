"""Every rule takes a tree of 0 nodes: it emits one token of the target."""

import jax
import jax.numpy as jnp
import pytest

from specjax import accept, rng
from specjax.types import CHAIN, Draft


@pytest.mark.parametrize("name", accept.names())
def test_a_tree_without_nodes(name):
    rule = accept.load(name)
    none = jnp.zeros((2, 0), jnp.int32)
    parents = None if rule.siblings == (CHAIN,) else none
    draft = Draft(none, none > 0, parents, depth=0)
    logits = jnp.asarray([[[0.0, 3.0, 1.0]], [[2.0, 0.0, 1.0]]])
    verdict = jax.jit(rule.greedy)(draft, logits)
    assert verdict.tokens.tolist() == [[1], [0]] and verdict.count.tolist() == [1, 1]
    keys = rng.RowKeys(rng.row_keys(0, 2), jnp.asarray(0), jnp.asarray([1, 1]))
    target = jnp.asarray([[[0.0, 0.0, 1.0]], [[0.0, 1.0, 0.0]]])
    sampled = jax.jit(rule.sampled)(keys, draft, target)
    assert sampled.tokens.tolist() == [[2], [1]] and sampled.path.shape == (2, 0)
