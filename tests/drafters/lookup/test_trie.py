"""The frequency trie against a plain Python trie, and the invariants of its trees."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import lookup_frequency as _frequency

from specjax import ModelParams, make_sampling
from specjax.data import datastore
from specjax.drafters.lookup import trie
from specjax.errors import UserError
from specjax.testing import tabular
from specjax.types import Context

pytestmark = pytest.mark.fast

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "trie": ("trie", {"nodes": 4, "depth": 2, "max_ngram": 2, "samples": 8}, ("deterministic",)),
}
ROWS, SLOTS, VOCAB, DEPTH, NODES, LONGEST, WEIGHT = 300, 20, 3, 4, 7, 5, 0.25


def frequencies(conts):
    """The weight of every prefix, and the number of the first continuation with it."""
    weight, order = collections.Counter(), {}
    for index, (cont, w) in enumerate(conts):
        for n in range(1, len(cont) + 1):
            weight[cont[:n]] += w
            order.setdefault(cont[:n], index)
    return weight, order


def model(text, prompt, documents):
    """{path: weight} of all paths, and the paths in order of preference."""

    def common(end):
        n = 0
        while n < min(LONGEST, end) and text[end - 1 - n] == text[-1 - n]:
            n += 1
        return n

    ends = sorted((e for e in range(1, len(text)) if common(e)), key=lambda e: (-common(e), -e))
    seen = []
    for size in range(LONGEST, 0, -1):
        seen = [tuple(text[e : e + DEPTH]) for e in ends if common(e) >= size]
        if len({c[:n] for c in seen for n in range(1, len(c) + 1)}) >= DEPTH:
            break
    conts = [(c, 1 - WEIGHT if e < prompt else WEIGHT) for c, e in zip(seen, ends, strict=False)]
    for size in range(min(LONGEST, len(text)), 0, -1):
        ends = [
            (d, e)
            for d in documents
            for e in range(size, len(d))
            if d[e - size : e] == text[-size:]
        ]
        if ends:
            conts += [(tuple(d[e : e + DEPTH]), WEIGHT) for d, e in ends]
            break
    weight, order = frequencies(conts)
    ranked = sorted(weight, key=lambda path: (-weight[path], len(path), order[path]))
    return weight, ranked


def paths_of(draft, row):
    """The tokens from the pending token to each node; checks the order of the nodes."""
    paths = []
    for node in range(NODES):
        if draft.valid[row, node]:
            parent = int(draft.parents[row, node])
            assert parent < node and (parent < 0 or draft.valid[row, parent])
            paths.append((*(paths[parent] if parent >= 0 else ()), int(draft.tokens[row, node])))
    return paths


@pytest.mark.parametrize("warm", [False, True])
def test_equals_the_plain_trie(warm):
    rng = np.random.default_rng(3)
    length = rng.integers(1, SLOTS + 1, ROWS)
    prompt = rng.integers(1, length + 1)
    tokens = rng.integers(0, VOCAB, (ROWS, SLOTS))
    documents = [rng.integers(0, VOCAB, n).tolist() for n in (9, 14, 1)] if warm else []
    store = datastore.build(documents) if warm else None
    keys = {
        "nodes": NODES,
        "depth": DEPTH,
        "max_ngram": LONGEST,
        "output_weight": WEIGHT,
        "datastore": store,
    }
    drafter = trie.make(tabular(VOCAB), **keys)
    context = Context(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32), make_sampling(ROWS)
    )
    params = ModelParams({}, drafter.init_params(None))
    draft, _ = jax.jit(drafter.propose)(params, None, context, jnp.asarray(prompt, jnp.int32))
    draft, full = jax.tree.map(np.asarray, draft), 0
    for row in range(ROWS):
        text = tokens[row, : length[row]].tolist()
        weight, ranked = model(text, int(prompt[row]), documents)
        got, expected = paths_of(draft, row), ranked[:NODES]
        # With a datastore the choice among paths of equal weight is free: it depends on the order
        # of occurrences in the suffix array.
        assert [weight[p] for p in got] == pytest.approx([weight[p] for p in expected]), (
            text,
            prompt[row],
        )
        if not warm:
            assert got == expected
        full += len(got) == NODES
    assert full > ROWS / 4


def test_prefixes_are_counted_and_parents_are_included():
    """Continuations in random order: counts, ties, empty ones, more nodes than prefixes."""
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 2, (64, 6, 5))
    windows = np.where(np.arange(5) < rng.integers(0, 6, (64, 6, 1)), windows, -1)
    weights = rng.integers(0, 3, (64, 6)).astype(np.float32)
    for nodes in (4, 40):
        tree = jax.jit(jax.vmap(lambda w, x: _frequency.tree(w, x, nodes)))(windows, weights)  # noqa: B023
        tokens, valid, parents, weight = map(np.asarray, tree)
        for row in range(64):
            conts = [
                (tuple(w[w >= 0].tolist()), x)
                for w, x in zip(windows[row], weights[row], strict=True)
            ]
            counted, order = frequencies(conts)
            ranked = sorted(
                (p for p in counted if counted[p] > 0),
                key=lambda p: (-counted[p], len(p), order[p]),
            )
            paths = []
            for node in np.flatnonzero(valid[row]):
                parent = parents[row, node]
                assert parent < node
                paths.append((*(paths[parent] if parent >= 0 else ()), tokens[row, node]))
            assert paths == ranked[:nodes]
            assert weight[row][valid[row]].tolist() == [counted[p] for p in paths]


def test_invalid_keys_are_refused():
    for keys, message in [
        ({"nodes": 0}, "nodes is 0; it must be a whole number >= 1"),
        ({"min_ngram": 9}, "max_ngram is 8 and min_ngram 9"),
        ({"output_weight": 1.0}, r"output_weight is 1.0; it must be a number in \(0, 1\)"),
        ({"memory": 0}, "memory is 0"),
    ]:
        with pytest.raises(UserError, match=message):
            trie.make(tabular(VOCAB), **keys)
