"""Prompt lookup against a plain Python search, on many random contexts of a small alphabet."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import prompt_lookup

pytestmark = pytest.mark.fast


def search(text, gamma, max_ngram, match, partial):
    """The continuation that the rule proposes: longest n-gram first, then earliest or latest."""
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
        ends = [e for e in ends if partial or e + gamma <= len(text)]
        if ends:
            end = ends[0] if match == "earliest" else ends[-1]
            return text[end : end + gamma]
    return []


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("match", ["earliest", "latest"])
@pytest.mark.parametrize("max_ngram, gamma", [(1, 1), (3, 4), (5, 10)])
def test_equals_the_plain_search(max_ngram, gamma, match, partial):
    rng = np.random.default_rng(max_ngram * gamma)
    rows, slots = 2_000, 24
    length = rng.integers(1, slots + 1, rows)
    alphabet = rng.integers(1, 5, rows)
    tokens = rng.integers(0, 1 << 30, (rows, slots)) % alphabet[:, None]
    find = functools.partial(prompt_lookup.lookup, gamma=gamma, max_ngram=max_ngram, match=match, partial=partial)
    found, valid = jax.jit(jax.vmap(find))(jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32))
    found, valid, proposals = np.asarray(found), np.asarray(valid), 0
    for row in range(rows):
        text = tokens[row, : length[row]].tolist()
        expected = search(text, gamma, max_ngram, match, partial)
        assert found[row][valid[row]].tolist() == expected
        assert valid[row].tolist() == [True] * len(expected) + [False] * (gamma - len(expected))
        proposals += bool(expected)
    assert proposals > rows / 10
