"""Tries of sequences against a dict of prefixes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.topology import shapes

pytestmark = pytest.mark.fast


def prefixes(sequences):
    """The nodes of the trie."""
    return {tuple(each[: end + 1]) for each in sequences for end in range(len(each))}


def named(tokens, parents, nodes):
    """Node -> prefix, for the given nodes. A KeyError if the parent of a node is not given."""
    names = {-1: ()}
    for node in nodes:
        names[node] = (*names[parents[node]], tokens[node])
    return names


@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 1, 5), (6, 7, 1)])
def test_merge_batched(shape):
    rng = np.random.default_rng(0)
    merged = jax.jit(shapes.merge_batched)
    for _ in range(5):
        batch, k, length = shape
        tokens = rng.integers(0, 3, shape).astype(np.int32)
        # With holes: entries after a hole do not count.
        valid = rng.random(shape) < 0.85
        out = merged(jnp.asarray(tokens), jnp.asarray(valid))
        assert [x.dtype for x in out] == [jnp.int32, jnp.int32, bool]
        assert all(x.shape == (batch, k * length) for x in out)
        for row in range(batch):
            ends = [int(np.argmin([*each, False])) for each in valid[row]]
            sequences = [tokens[row, i, :end].tolist() for i, end in enumerate(ends)]
            got_tokens, parents, kept = (np.asarray(x[row]).tolist() for x in out)
            assert all(-1 <= parent < node for node, parent in enumerate(parents))
            nodes = [node for node in range(k * length) if kept[node]]
            names = named(got_tokens, parents, nodes)
            assert sorted(names[node] for node in nodes) == sorted(prefixes(sequences))
            # The layout: the earliest sequence with the prefix keeps the node.
            for node in nodes:
                depth, i = divmod(node, k)
                assert len(names[node]) == depth + 1
                through = [j for j in range(k) if tuple(sequences[j][: depth + 1]) == names[node]]
                assert i == min(through)


def test_merge_batched_of_empty_sequences():
    out = shapes.merge_batched(jnp.zeros((2, 3, 0), jnp.int32), jnp.zeros((2, 3, 0), bool))
    assert [x.shape for x in out] == [(2, 0)] * 3
    out = shapes.merge_batched(jnp.zeros((1, 2, 2), jnp.int32), jnp.zeros((1, 2, 2), bool))
    assert not out[2].any()
