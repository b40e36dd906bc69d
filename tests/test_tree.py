"""Trees, and trees in a decoder: a path is scored like plain text, a commit keeps its cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import testing, tree
from specjax.models import lm

# Parents in a block: the pending token, then six nodes.
PARENTS = [[-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1, 2, 2, 0, 0]]


def paths(parents):
    """The nodes from the root to each node, by walking up."""
    out = []
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        out.append(path)
    return out


def test_ancestors_and_depths():
    parents = jnp.asarray(PARENTS)
    for row, each in enumerate(PARENTS):
        for node, path in enumerate(paths(each)):
            assert np.flatnonzero(tree.ancestors(parents)[row, node]).tolist() == sorted(path)
            assert int(tree.depths(parents, 2, 7)[row, node]) == len(path) - 1


def test_existing_nodes_and_paths():
    """A node exists if it and its ancestors are valid. A path is listed from the root down."""
    rng = np.random.default_rng(0)
    parents = np.array([[rng.integers(-1, i) for i in range(9)] for _ in range(50)])
    valid = rng.random((50, 9)) < 0.8
    exists = np.asarray(tree.exists(jnp.asarray(valid), jnp.asarray(parents)))
    ends = rng.integers(-1, 9, 50)
    result = np.asarray(tree.path_to(jnp.asarray(ends), jnp.asarray(parents), 9))
    for row in range(50):
        up = [[] for _ in range(10)]
        for node in range(9):
            up[node] = [*(up[parents[row, node]] if parents[row, node] >= 0 else []), node]
            assert exists[row, node] == valid[row, up[node]].all()
        assert result[row].tolist() == up[ends[row]] + [-1] * (9 - len(up[ends[row]]))
    chain = np.asarray(tree.exists(jnp.asarray(valid), None))
    np.testing.assert_array_equal(chain, np.cumprod(valid, 1) > 0)


SIZE, ROWS = 10, 8


@functools.cache
def model(family):
    """A model, its params, ragged prompts, and their cache without the last token of each.

    Then the jitted pass over a block, and the jitted logits of plain texts.
    """
    made, params = testing.tiny(family, 0)
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 7, ROWS)
    texts = rng.integers(0, 32, (ROWS, 6))
    cache = made.init_cache(ROWS, 24)
    _, block = made.apply(params, jnp.asarray(texts), cache)
    cache = made.commit(cache, block, jnp.asarray(lengths - 1, jnp.int32))
    prompts = [texts[row, :n].tolist() for row, n in enumerate(lengths)]
    return (
        made,
        params,
        prompts,
        cache,
        jax.jit(made.apply),
        jax.jit(lambda tokens: lm.forward(made, params, tokens).logits),
    )


def random_block(prompts, seed):
    rng = np.random.default_rng(seed)
    parents = np.array([[-1, *(rng.integers(0, i) for i in range(1, SIZE))] for _ in prompts])
    tokens = rng.integers(0, 32, parents.shape)
    tokens[:, 0] = [p[-1] for p in prompts]
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(parents, jnp.int32)


@pytest.mark.parametrize("seed", by_default(range(4), (0,)))
@pytest.mark.parametrize("family", by_default(["llama", "gpt2"], ["llama"]))
def test_random_trees(family, seed):
    """One random tree per row.

    Every root-to-node path is scored like the plain text, also if the tree grows in parts. After
    the commit of a random path, the cache is equal to that of a fresh prefill.
    """
    made, params, prompts, cache, apply, plainly = model(family)
    tokens, parents = random_block(prompts, seed)
    out, block = apply(params, tokens, cache, tree.layout(parents))
    grown, parts = None, []
    for start, end in ((0, 1), (1, 4), (4, SIZE)):
        layout = tree.layout(parents[:, :end], end - start)
        part, own = apply(params, tokens[:, start:end], cache, layout, grown)
        grown = own if grown is None else tree.join(grown, own)
        parts.append(part.logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), out.logits, atol=1e-5)
    for whole, in_parts in zip(jax.tree.leaves(block), jax.tree.leaves(grown), strict=True):
        np.testing.assert_allclose(whole, in_parts, atol=1e-5)

    rows, where = [], []
    for row, prompt in enumerate(prompts):
        for node, path in enumerate(paths(np.asarray(parents[row]).tolist())):
            rows.append(prompt[:-1] + np.asarray(tokens)[row, path].tolist())
            where.append((row, node))
    width = 6 + SIZE
    packed = jnp.asarray([r + [0] * (width - len(r)) for r in rows])
    plain = np.asarray(plainly(packed))
    scored = np.asarray(out.logits)
    for i, (row, node) in enumerate(where):
        np.testing.assert_allclose(scored[row, node], plain[i, len(rows[i]) - 1], atol=1e-5)

    rng = np.random.default_rng(seed)
    kept = [paths(np.asarray(parents[row]).tolist())[rng.integers(SIZE)] for row in range(ROWS)]
    path = np.full((ROWS, SIZE), -1)
    for row, nodes in enumerate(kept):
        path[row, : len(nodes)] = nodes
    count = jnp.asarray([len(nodes) for nodes in kept], jnp.int32)
    after = made.commit(cache, block, count, jnp.asarray(path, jnp.int32))
    texts = [
        prompt[:-1] + np.asarray(tokens)[row, kept[row]].tolist()
        for row, prompt in enumerate(prompts)
    ]
    assert after.length.tolist() == [len(t) for t in texts]
    padded = jnp.asarray([t + [0] * (width - len(t)) for t in texts])
    fresh = made.init_cache(ROWS, 24)
    fresh = made.commit(fresh, apply(params, padded, fresh)[1], after.length)
    for cached, expected in zip(after.k + after.v, fresh.k + fresh.v, strict=True):
        for row, text in enumerate(texts):
            here = (row, slice(None), slice(len(text)))
            np.testing.assert_allclose(cached[here], expected[here], atol=1e-5)


def test_the_order_of_siblings_does_not_matter():
    _, params, prompts, cache, apply, _ = model("llama")
    tokens, parents = random_block(prompts, 9)
    old = np.asarray(parents)
    order = np.stack([_shuffled(p, np.random.default_rng(row)) for row, p in enumerate(old)])
    assert (order != np.arange(SIZE)).any()
    above = np.take_along_axis(old, order, 1)
    new = np.where(above < 0, -1, np.take_along_axis(np.argsort(order, 1), np.maximum(above, 0), 1))
    moved = jnp.take_along_axis(tokens, jnp.asarray(order), 1)
    one = apply(params, tokens, cache, tree.layout(parents))[0].logits
    other = apply(params, moved, cache, tree.layout(jnp.asarray(new)))[0].logits
    expected = jnp.take_along_axis(one, jnp.asarray(order)[..., None], 1)
    np.testing.assert_allclose(other, expected, atol=1e-5)


def _shuffled(parents, rng):
    """Another topological order of the same tree."""
    order, ready = [], [0]
    while ready:
        order.append(ready.pop(rng.integers(len(ready))))
        ready += np.flatnonzero(parents == order[-1]).tolist()
    return np.array(order)
