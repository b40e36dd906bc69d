"""REST against a plain Python model: longest phrase, spread samples, most frequent prefixes."""

from __future__ import annotations

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.data import datastore
from specjax.errors import UserError
from specjax.types import DETERMINISTIC, Context, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "rest": (
        "rest",
        {"nodes": 4, "depth": 2, "max_ngram": 3, "samples": 8, "datastore": "@datastore"},
        ("traversal",),
    ),
}

V = 3


def documents(seed, count=10, longest=40, alphabet=V):
    random = np.random.default_rng(seed)
    return [
        random.integers(0, alphabet, random.integers(1, longest)).tolist() for _ in range(count)
    ]


STORE = datastore.build(documents(0), 8)


def weights(text, *, max_ngram, min_ngram, samples, depth):
    """Prefix -> how often it occurs after the longest phrase, as in the paper."""
    tokens, order = STORE.tokens.tolist(), STORE.order.tolist()
    for n in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        places = [i for i in order if tokens[i : i + n] == text[-n:]]
        if any(tokens[i + n] >= 0 for i in places):
            break
    else:
        return Counter()
    if len(places) > samples:
        edges = [
            i * (len(places) // samples) + i * (len(places) % samples) // samples
            for i in range(samples + 1)
        ]
        places = [places[a + (b - a) // 2] for a, b in itertools.pairwise(edges)]
    seen = Counter()
    for place in places:
        after = tokens[place + n : place + n + depth]
        after = after[: after.index(-1)] if -1 in after else after
        seen.update(tuple(after[:size]) for size in range(1, len(after) + 1))
    return seen


@pytest.mark.fast
def test_equals_the_plain_rule():
    rows, slots = 400, 14
    keys = {"max_ngram": 5, "min_ngram": 2, "samples": 6, "depth": 4}
    nodes = 7
    target, random = testing.tabular(4), np.random.default_rng(1)
    drafter = drafters.make("rest", target, datastore=STORE, nodes=nodes, **keys)
    length = random.integers(1, slots + 1, rows)
    tokens = random.integers(0, V, (rows, slots))
    # Not in the store.
    tokens[::9, :] = 3
    tokens = np.where(np.arange(slots) < length[:, None], tokens, -1)
    context = Context(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32), sampling.make_sampling(rows)
    )
    params = ModelParams({}, drafter.init_params(jax.random.key(0)))
    draft = jax.jit(lambda p, c: drafter.propose(p, None, c, ())[0])(params, context)
    testing.check_draft(draft, 4, DETERMINISTIC)
    assert draft.longest == 4
    sizes = []
    for row in range(rows):
        seen = weights(tokens[row, : length[row]].tolist(), **keys)
        valid = np.asarray(draft.valid[row])
        paths = [()] * nodes
        for node in range(nodes):
            parent = int(draft.parents[row, node])
            paths[node] = ((*paths[parent],) if parent >= 0 else ()) + (
                int(draft.tokens[row, node]),
            )
        chosen = [path for path, real in zip(paths, valid, strict=True) if real]
        assert len(set(chosen)) == len(chosen) == min(nodes, len(seen))
        best = sorted(seen.values(), reverse=True)[: len(chosen)]
        # Among equal counts the choice is free.
        assert [seen[path] for path in chosen] == best
        sizes.append(len(chosen))
    assert min(sizes) == 0 and np.mean(np.array(sizes) == nodes) > 0.3
    short = drafters.make("rest", target, datastore=STORE, nodes=2, **keys)
    assert (short.longest, short.siblings, short.nodes) == (2, DETERMINISTIC, 2)


@pytest.mark.fast
def test_drafts_of_text_in_the_store_are_accepted():
    """The target's output is a document of the store: every round accepts the whole draft."""
    text = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    target = testing.tabular(12)
    table = 60 * jnp.broadcast_to(jax.nn.one_hot((jnp.arange(12) + 1) % 12, 12), (13, 12, 12))
    store = datastore.build([[5, 5], text, text[:4]])
    drafter = drafters.make("rest", target, datastore=store, depth=3, nodes=8, samples=4)
    params = ModelParams(table, drafter.init_params(jax.random.key(0)))
    packed, lengths = decode.pack_prompts([[0, 1], [3], [1, 2, 3, 4]])
    state = decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, 3),
        max_len=12,
        sampling=sampling.make_sampling(3, [0.0, 1.0, 1.0]),
        limit=jnp.asarray([10, 7, 8]),
    )
    state, records = decode.generate(
        target, drafter, accept.load("deterministic"), params, state, max_steps=8
    )
    assert decode.outputs(state, lengths.tolist()) == [text[2:10], text[4:10], text[5:9]]
    # The second row begins with one token, less than the shortest phrase: its first draft is empty.
    assert records.emitted[:4].T.tolist() == [[4, 4, 0, 0], [1, 4, 1, 0], [4, 0, 0, 0]]
    assert records.accepted[0].tolist() == [3, 0, 3]


@pytest.mark.slow
@pytest.mark.fast
def test_exact_law():
    """The reference draws the target's token for every path separately: not lossless. This is."""
    target = testing.tabular(V)
    drafter = drafters.make(
        "rest", target, datastore=STORE, max_ngram=2, min_ngram=1, samples=6, depth=2, nodes=5
    )
    with jax.enable_x64(True):
        table = testing.random_table(1, V)
        params = ModelParams(table, drafter.init_params(jax.random.key(0)))
        truth = testing.sequence_law(target, table, [2, 1], 3, temperature=1.0)
        law = testing.exact_law(
            target,
            drafter,
            accept.load("deterministic"),
            params,
            [2, 1],
            3,
            rounds=1,
            temperature=1.0,
        )
    assert testing.total_variation(law, truth) < 1e-12


@pytest.mark.fast
def test_invalid_keys_are_refused_in_one_line(tmp_path):
    target = testing.tabular(V)
    for keys, message in (
        ({"max_ngram": 0}, "max_ngram is 0; it must be a whole number >= 1"),
        ({"min_ngram": 9, "max_ngram": 8}, "max_ngram is 8 and min_ngram 9"),
        (
            {"max_ngram": 9},
            "max_ngram is 9 and the datastore's reach 8; lower max_ngram, or build the datastore",
        ),
        ({"samples": 0, "max_ngram": 8}, "samples is 0"),
        ({"depth": 1.5, "max_ngram": 8}, "depth is 1.5"),
        ({"nodes": 0, "max_ngram": 8}, "nodes is 0"),
        ({"datastore": tmp_path / "none"}, "has no datastore.json; build the datastore with"),
    ):
        with pytest.raises(UserError, match=message):
            drafters.make("rest", target, **{"datastore": STORE, **keys})
    with pytest.raises(UserError, match="the datastore has the token id 2 and the target 2 tokens"):
        drafters.make("rest", testing.tabular(2), datastore=STORE, max_ngram=8)
    datastore.save(tmp_path, STORE, vocab_size=V, vocabulary=None)
    loaded = drafters.make("rest", target, datastore=str(tmp_path), max_ngram=8).init_params(
        jax.random.key(0)
    )
    np.testing.assert_array_equal(loaded["order"], STORE.order)
