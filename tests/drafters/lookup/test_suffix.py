"""SuffixDecoding's candidates and scores against a plain Python model that scans for substrings."""

from __future__ import annotations

from fractions import Fraction

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ModelParams, accept, decode, make_sampling, row_keys
from specjax.data import datastore
from specjax.drafters.lookup import suffix
from specjax.errors import UserError
from specjax.testing import tabular
from specjax.types import Context

pytestmark = pytest.mark.fast

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "suffix": ("suffix", {"nodes": 4, "depth": 2, "max_ngram": 4, "samples": 8}, ("recursive",)),
}
ROWS, SLOTS, VOCAB, DEPTH, NODES, LONGEST = 300, 20, 3, 4, 5, 6


def occurrences(documents, pattern):
    """(end, continuation) of the pattern, in the order of a suffix array.

    Only those that a token follows.
    """
    result, m = [], len(pattern)
    for which, document in enumerate(documents):
        for end in range(m, len(document)):
            if document[end - m : end] == pattern:
                result.append(
                    ((*document[end - m :], -1), which, end, tuple(document[end : end + DEPTH]))
                )
    return [(end, cont) for _, _, end, cont in sorted(result)]


def common(text, end):
    n = 0
    while n < min(LONGEST, end) and text[end - 1 - n] == text[-1 - n]:
        n += 1
    return n


def candidate(conts, budget, min_prob, mode):
    """{path: probability} of one match."""
    share = {}
    for index, cont in enumerate(conts):
        for n in range(1, len(cont) + 1):
            count, first = share.get(cont[:n], (0, index))
            share[cont[:n]] = (count + 1, first)
    prob = {path: Fraction(count, len(conts)) for path, (count, _) in share.items()}
    if mode == "tree":
        ranked = sorted(prob, key=lambda path: (-prob[path], len(path), share[path][1]))
        return {path: prob[path] for path in ranked[:budget] if prob[path] >= min_prob}
    chosen, path = {}, ()
    while len(chosen) < budget:
        below = [p for p in prob if len(p) == len(path) + 1 and p[:-1] == path]
        if not below:
            break
        path = max(below, key=lambda p: (prob[p], -share[p][1]))
        if prob[path] < min_prob:
            break
        chosen[path] = prob[path]
    return chosen


def best(sources, text, min_prob, mode):
    """The candidate with the best score: the longest match and the row's own text first."""
    candidates = []
    for own, documents in sources:
        for m in range(1, min(LONGEST, len(text)) + 1):
            conts = occurrences(documents, text[-m:])
            if own:
                conts.sort(key=lambda c: (-common(text, c[0]), -c[0]))
            chosen = candidate([c for _, c in conts], min(NODES, m), min_prob, mode)
            candidates.append((sum(chosen.values()), m, own, chosen))
    candidates.sort(key=lambda c: (c[0], c[1], c[2]), reverse=True)
    return candidates[0][3] if candidates and candidates[0][0] > 0 else {}


def paths(draft, row):
    """The tokens from the pending token to each node that exists."""
    spelled, exists = {}, {}
    for node in range(draft.tokens.shape[1]):
        parent = node - 1 if draft.parents is None else int(draft.parents[row, node])
        exists[node] = bool(draft.valid[row, node]) and (parent < 0 or exists[parent])
        if exists[node]:
            spelled[node] = (*spelled.get(parent, ()), int(draft.tokens[row, node]))
    return set(spelled.values())


@pytest.mark.parametrize("mode", ["tree", "path"])
@pytest.mark.parametrize("warm", [False, True])
def test_equals_the_substring_scan(mode, warm):
    rng = np.random.default_rng(5)
    length = rng.integers(1, SLOTS + 1, ROWS)
    tokens = rng.integers(0, VOCAB, (ROWS, SLOTS))
    documents = [rng.integers(0, VOCAB, n).tolist() for n in (9, 14, 1, 6)]
    store = datastore.build(documents) if warm else None
    keys = {
        "nodes": NODES if mode == "tree" else DEPTH,
        "depth": DEPTH,
        "max_ngram": LONGEST,
        "min_prob": 0.3,
        "mode": mode,
        "datastore": store,
    }
    drafter = suffix.make(tabular(VOCAB), **keys)
    context = Context(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32), make_sampling(ROWS)
    )
    draft, _ = jax.jit(drafter.propose)(
        ModelParams({}, drafter.init_params(None)), None, context, ()
    )
    draft, full = jax.tree.map(np.asarray, draft), 0
    for row in range(ROWS):
        text = tokens[row, : length[row]].tolist()
        expected = best(
            [(True, [text]), *([(False, documents)] if warm else [])], text, Fraction(3, 10), mode
        )
        assert paths(draft, row) == set(expected), (text, row)
        full += len(expected) > 1
    assert full > ROWS / 3


def test_learn_keeps_the_newest_outputs():
    target = tabular(VOCAB)
    drafter = suffix.make(target, nodes=2, depth=2, max_ngram=2, memory=12)
    params = ModelParams(cases.table(0), drafter.init_params(None))
    # Without a datastore there is no text to begin with.
    assert params.draft == {}
    packed, lengths = decode.pack_prompts([[0, 1], [2]])
    for turn in range(2):
        state = decode.prefill(
            target,
            drafter,
            params,
            packed,
            lengths,
            row_keys(turn, 2),
            max_len=6,
            sampling=make_sampling(2),
        )
        rule = accept.load("deterministic")
        state, _ = decode.generate(target, drafter, rule, params, state, max_steps=6)
        outputs = decode.outputs(state, lengths)
        params = params._replace(draft=drafter.rare.learn(params, state, np.asarray(lengths)))
    kept = [d.tolist() for d in datastore.split(np.asarray(params.draft["tokens"]))]
    # The outputs of the last turn: 4 + 5 tokens and two separators.
    assert params.draft["tokens"].shape == (12,) and kept == outputs


def test_invalid_keys_are_refused():
    for keys, message in [
        ({"mode": "list"}, "mode is 'list'; it must be one of tree, path"),
        ({"min_ngram": 9, "max_ngram": 3}, "max_ngram is 3 and min_ngram 9"),
        ({"min_prob": 2.0}, "min_prob is 2.0; it must be a number in"),
        ({"factor": 0.0}, "even a match of 16 tokens may propose no token"),
        (
            {"max_ngram": 40, "datastore": datastore.build([[1]])},
            "max_ngram is 40 and the datastore's reach 32",
        ),
        ({"min_score": float("nan")}, "min_score is nan; it must be a number >= 0"),
        ({"factor": "a"}, "factor is 'a'; it must be a number >= 0"),
        ({"datastore": 3}, "datastore is '3'; give a directory"),
        ({"nodes": 0}, "nodes is 0"),
        ({"mode": "path", "nodes": 9, "depth": 8}, "nodes is 9 and depth 8: a path has at most 8"),
        (
            {"datastore": datastore.build([[7, 7]])},
            "the datastore has the token id 7 and the target 3 tokens",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            suffix.make(tabular(VOCAB), **keys)


@pytest.mark.parametrize(
    ("keys", "nodes", "depth"),
    [
        ({}, 16, 16),
        ({"nodes": 4}, 4, 4),
        ({"depth": 4}, 16, 4),
        ({"mode": "path"}, 16, None),
        # A chain verifies every node, so it has no node beyond the longest path.
        ({"mode": "path", "depth": 4}, 4, None),
        ({"mode": "path", "nodes": 20}, 20, None),
        ({"mode": "path", "nodes": 4, "depth": 8}, 4, None),
    ],
)
def test_sizes_that_are_not_given_follow_from_the_others(keys, nodes, depth):
    drafter = suffix.make(tabular(VOCAB), **keys)
    assert (drafter.nodes, drafter.depth) == (nodes, depth)
