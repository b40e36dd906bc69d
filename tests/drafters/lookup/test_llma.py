"""LLMA against a plain Python search: in shared documents, in each row's own, and in its prompt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ModelParams, make_sampling
from specjax.drafters.lookup import llma
from specjax.errors import UserError
from specjax.testing import tabular
from specjax.types import Context

pytestmark = pytest.mark.fast

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "llma": ("llma", {"gamma": 2, "max_ngram": 2, "datastore": "@text"}, ("chain",)),
}
ROWS, SLOTS, VOCAB = 2_000, 16, 4


def search(documents, text, gamma, max_ngram, min_ngram, match):
    for n in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        ends = [
            (d, e)
            for d, doc in enumerate(documents)
            for e in range(n, len(doc))
            if doc[e - n : e] == text[-n:]
        ]
        if ends:
            document, end = ends[0] if match == "earliest" else ends[-1]
            return documents[document][end : end + gamma]
    return []


def drafts(drafter, params, tokens, length, prompt):
    context = Context(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32), make_sampling(len(length))
    )
    draft, _ = jax.jit(drafter.propose)(
        ModelParams({}, params), None, context, jnp.asarray(prompt, jnp.int32)
    )
    drafted, valid = np.asarray(draft.tokens), np.asarray(draft.valid)
    return [row[good].tolist() for row, good in zip(drafted, valid, strict=True)]


@pytest.mark.parametrize("match", ["earliest", "latest"])
@pytest.mark.parametrize("min_ngram", [1, 2])
def test_equals_the_plain_search(min_ngram, match):
    rng = np.random.default_rng(min_ngram)
    keys = {"gamma": 5, "max_ngram": 4, "min_ngram": min_ngram, "match": match}
    documents = [rng.integers(0, VOCAB, n).tolist() for n in (12, 1, 30)]
    tokens, length = rng.integers(0, VOCAB, (ROWS, SLOTS)), rng.integers(1, SLOTS + 1, ROWS)
    prompt = np.minimum(rng.integers(1, SLOTS + 1, ROWS), length)
    shared = llma.make(tabular(VOCAB), datastore=documents, **keys)
    own = llma.make(tabular(VOCAB), **keys)
    rows = np.where(
        np.arange(20) < rng.integers(1, 20, ROWS)[:, None], rng.integers(0, VOCAB, (ROWS, 20)), -1
    )
    in_shared = drafts(shared, shared.init_params(None), tokens, length, prompt)
    in_prompt = drafts(own, own.init_params(None), tokens, length, prompt)
    in_rows = drafts(own, {"documents": jnp.asarray(rows, jnp.int32)}, tokens, length, prompt)
    for i in range(ROWS):
        text = tokens[i, : length[i]].tolist()
        assert in_shared[i] == search(documents, text, **keys)
        assert in_prompt[i] == search([text[: prompt[i]]], text, **keys)
        assert in_rows[i] == search([rows[i][rows[i] >= 0].tolist()], text, **keys)
    assert sum(map(bool, in_prompt)) > ROWS / 6


def test_invalid_keys_are_refused():
    for keys, message in [
        ({"datastore": [[], []]}, "datastore has no tokens"),
        ({"datastore": [[0, 9]]}, "the datastore has the token id 9 and the target 4 tokens"),
        ({"gamma": 0}, "gamma is 0"),
        ({"max_ngram": 1, "min_ngram": 2}, "max_ngram is 1 and min_ngram 2"),
        ({"match": "best"}, "match is 'best'"),
    ]:
        with pytest.raises(UserError, match=message):
            llma.make(tabular(VOCAB), **keys)
