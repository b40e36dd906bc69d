"""Trees through a real decoder: every path is scored as a plain text, and a commit leaves the cache of that text."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing, tree
from specjax.models import lm

PROMPTS = [[1, 2, 3, 4], [5, 6]]  # ragged; the last token of each is pending
PARENTS = [[-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1, 2, 2, 0, 0]]  # of the block: the pending token, then six nodes


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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_paths_and_commit(family):
    model, params = testing.tiny(family, 0)
    cache = model.init_cache(2, 16)
    fed = jnp.asarray([[1, 2, 3], [5, 0, 0]])
    _, cache = model.apply(params, fed, cache)
    cache = model.commit(cache, jnp.asarray([3, 1]))
    rng = np.random.default_rng(0)
    block = np.concatenate([[[4], [6]], rng.integers(0, 32, (2, 6))], 1)
    out, cache = model.apply(params, jnp.asarray(block), cache, jnp.asarray(PARENTS))
    for row, prompt in enumerate(PROMPTS):
        for node, path in enumerate(paths(PARENTS[row])):
            text = [*prompt[:-1], *block[row, path].tolist()]
            plain = lm.forward(model, params, jnp.asarray([text])).logits[0, -1]
            np.testing.assert_allclose(out.logits[row, node], plain, atol=1e-5)
    # Keep node 5 then 6 of row 0 (a path that is not contiguous), and nothing but the pending token of row 1.
    kept = jnp.asarray([[1, 4, 5], [-1, -1, -1]])  # ids after the root
    cache = model.commit(cache, jnp.asarray([4, 1]), kept)
    texts = [[1, 2, 3, *block[0, [0, 2, 5, 6]].tolist()], [5, 6]]
    for row, text in enumerate(texts):
        assert int(cache.length[row]) == len(text)
        _, fresh = model.apply(params, jnp.asarray([text]), model.init_cache(1, 16))
        for have, want in zip(cache.k + cache.v, fresh.k + fresh.v, strict=True):
            np.testing.assert_allclose(have[row, :, : len(text)], want[0, :, : len(text)], atol=1e-5)
