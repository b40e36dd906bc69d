"""Token recycling against a plain Python model of its matrix, round by round, and ``learn``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.drafters.lookup import token_recycling
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import Draft, ModelParams

pytestmark = pytest.mark.fast

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "token_recycling": ("token_recycling", {"tree": "2x1", "top_k": 2}, ("recursive",)),
}

V, K = 6, 3
TARGET, TABLE = testing.tabular(V), testing.random_table(0, V)
PROMPTS = [[2, 1], [4], [5, 0, 3, 3, 1], [1, 2, 5]]
NEW = [24, 3, 24, 17]
TEMPERATURES = [0.0, 0.0, 1.0, 0.7]
# Three levels, with leaves on each of them.
PARENTS = (-1, -1, -1, 0, 0, 1, 3, 3, 5)


@functools.cache
def made():
    return drafters.make("token_recycling", TARGET, tree=shapes.check(PARENTS), top_k=K)


def begin(params, temperature=TEMPERATURES, drafter=None):
    packed, lengths = decode.pack_prompts(PROMPTS)
    return decode.prefill(
        TARGET,
        drafter or made(),
        params,
        packed,
        lengths,
        rng.row_keys(0, len(PROMPTS)),
        max_len=packed.shape[1] + 24,
        limit=lengths + jnp.asarray(NEW),
        sampling=sampling.make_sampling(len(PROMPTS), temperature),
    )


def rounds(params, temperature=TEMPERATURES):
    """The state and the round's info after each round, as NumPy arrays."""
    begun = begin(params, temperature)
    for state, info in decode.stream(TARGET, made(), accept.load("recursive"), params, begun):
        yield jax.tree.map(np.asarray, (state.draft.matrix, state.tokens, state.length, info))


def winners(tokens, real, path):
    """{token: the node from which it gets its successors; 0 = the pending token}.

    Later nodes replace earlier ones; those on the path come last.
    """
    order = [node for node in range(len(tokens)) if real[node]]
    order.sort(key=lambda node: (node in path, node))
    return {tokens[node]: node for node in order}


def test_refresh_equals_a_plain_model():
    """Random trees and verdicts; few different tokens, so that most occur several times."""
    random, batch, size = np.random.default_rng(0), 300, 9
    parents = np.array(
        [[random.integers(-1, i) for i in range(size)] for _ in range(batch)], np.int32
    )
    tokens, valid = random.integers(0, V, (batch, size)), random.random((batch, size)) < 0.8
    pending, count = random.integers(0, V, batch), random.integers(0, 5, batch)
    best = random.integers(0, V, (batch, size + 1, K))
    path, before = np.full((batch, size), -1), random.integers(-1, V, (batch, V, K))
    after = before.copy()
    for row in range(batch):
        # The nodes from the root to each node.
        chains: list[list[int]] = []
        for node, parent in enumerate(parents[row]):
            chains.append([*(chains[parent] if parent >= 0 else []), node])
        real = [bool(valid[row, chain].all()) for chain in chains]
        taken = ([[]] + [c for c, r in zip(chains, real, strict=True) if r])[
            random.integers(sum(real) + 1)
        ]
        path[row, : len(taken)] = taken
        if count[row] > 0:
            nodes = {0, *(node + 1 for node in taken)}
            for token, node in winners([pending[row], *tokens[row]], [True, *real], nodes).items():
                after[row, token] = best[row, node]
    draft = Draft(jnp.asarray(tokens, jnp.int32), jnp.asarray(valid), parents=jnp.asarray(parents))
    arrays = (jnp.asarray(x, jnp.int32) for x in (path, count, best))
    got = jax.jit(token_recycling.refresh)(
        jnp.asarray(before), jnp.asarray(pending), draft, *arrays
    )
    np.testing.assert_array_equal(got, after)


def test_the_matrix_follows_a_plain_model():
    """Every draft and every matrix of ragged rows, greedy and sampled, from the table alone."""
    params = ModelParams(TABLE, made().init_params(None))
    shape, table = shapes.check(PARENTS), np.asarray(TABLE)
    memory = [{} for _ in PROMPTS]
    texts = [list(prompt) for prompt in PROMPTS]
    accepted = 0
    for matrix, tokens, length, info in rounds(params):
        for row, text in enumerate(texts):
            drafted, real = [], []
            for parent, rank in zip(shape.parents, shape.ranks, strict=True):
                above = text[-1] if parent < 0 else drafted[parent]
                drafted.append(memory[row].get(above, [-1] * K)[rank])
                real.append(drafted[-1] >= 0)
            emitted = info.tokens[row][: info.emitted[row]].tolist()
            if emitted:
                np.testing.assert_array_equal(info.draft.tokens[row], drafted)
                np.testing.assert_array_equal(info.draft.valid[row], real)
                at, path = -1, {0}
                for token in emitted:
                    below = [
                        n
                        for n, p in enumerate(shape.parents)
                        if p == at and real[n] and drafted[n] == token
                    ]
                    if not below:
                        break
                    at = below[0]
                    path.add(at + 1)
                accepted += len(path) - 1
                for token, node in winners([text[-1], *drafted], [True, *real], path).items():
                    parent = shape.parents[node - 1] if node else None
                    before = (
                        text[-1]
                        if parent == -1
                        else drafted[parent]
                        if node
                        else (text[-2:-1] or [V])[0]
                    )
                    memory[row][token] = np.argsort(-table[before, token], kind="stable")[
                        :K
                    ].tolist()
            text += emitted
            np.testing.assert_array_equal(
                matrix[row], [memory[row].get(t, [-1] * K) for t in range(V)]
            )
            assert tokens[row, : length[row]].tolist() == text
    assert [len(t) - len(p) for t, p in zip(texts, PROMPTS, strict=True)] == NEW
    assert accepted > 10


def test_greedy_rows_equal_plain_decoding_and_a_new_run_starts_empty():
    params = ModelParams(TABLE, made().init_params(None))
    plain = decode.autoregressive(TARGET, params, begin(params), max_steps=24)
    for _ in range(2):
        seen = list(rounds(params))
        assert not seen[0][3].draft.valid.any(), "the matrix of an earlier run was used"
        np.testing.assert_array_equal(seen[-1][1][:2, :30], plain.tokens[:2, :30])


def test_learn_carries_the_rows_over():
    cold = ModelParams(TABLE, made().init_params(None))
    state = begin(cold, 0.0)
    state, records = decode.generate(
        TARGET, made(), accept.load("recursive"), cold, state, max_steps=24
    )
    lengths = [len(p) for p in PROMPTS]
    learned = made().rare.learn(cold, state, lengths)
    expected = np.full((V, K), -1)
    for row in np.asarray(state.draft.matrix):
        for token in range(V):
            if row[token, 0] >= 0:
                expected[token] = row[token]
    np.testing.assert_array_equal(learned["matrix"], expected)
    warm = ModelParams(TABLE, learned)
    assert np.asarray(begin(warm, 0.0).draft.matrix == learned["matrix"]).all()
    again, fewer = decode.generate(
        TARGET, made(), accept.load("recursive"), warm, begin(warm, 0.0), max_steps=24
    )
    assert decode.outputs(again, lengths) == decode.outputs(state, lengths)
    assert (fewer.emitted > 0).sum() < (records.emitted > 0).sum()
    # Unknown entries of a later batch do not overwrite known ones.
    unknown = state.replace(draft=state.draft.replace(matrix=jnp.full_like(state.draft.matrix, -1)))
    np.testing.assert_array_equal(made().rare.learn(warm, unknown, lengths)["matrix"], expected)
    # A row without changes does not overwrite what another row learned.
    rows = jnp.broadcast_to(warm.draft["matrix"], state.draft.matrix.shape).at[0, 1].set(0)
    one = state.replace(draft=state.draft.replace(matrix=rows))
    np.testing.assert_array_equal(made().rare.learn(warm, one, lengths)["matrix"], rows[0])


def test_the_default_tree():
    """Eighty nodes; equal arguments give the same drafter, so that no program is compiled twice."""
    shape = token_recycling.default_tree()
    assert tuple(map(len, shape.levels)) == token_recycling.COUNTS == (8, 21, 25, 15, 8, 3)
    assert (shape.nodes, shape.depth, shape.branching) == (80, 6, 8)
    target = testing.tabular(9)
    drafter = drafters.make("token_recycling", target)
    assert (drafter.nodes, drafter.depth) == (80, 6)
    assert drafter == drafters.make("token_recycling", target, tree=shape, top_k=8)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"tree": "3x1", "top_k": 2},
            "top_k is 2 and a node of the tree has 3 children; raise top_k",
        ),
        ({"tree": "2x1", "top_k": 7}, "top_k is 7 and the vocabulary has 6 tokens; lower top_k"),
        ({"top_k": 8}, "top_k is 8 and the vocabulary has 6 tokens; lower top_k"),
        ({"top_k": 0}, "top_k is 0; it must be a whole number >= 1"),
        ({"tree": "2y1"}, "the tree is '2y1'; give"),
        ({"tree": 3}, "the tree is 3; give"),
    ],
)
def test_invalid_keys_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        drafters.make("token_recycling", TARGET, **keys)


def test_a_matrix_of_another_drafter_is_refused():
    params = ModelParams(TABLE, {"matrix": jnp.zeros((V, K + 1), jnp.int32)})
    with pytest.raises(
        UserError, match=r"a matrix of shape \(6, 4\), and with top_k=3 it is \(6, 3\)"
    ):
        begin(params)
