"""Lookahead against a plain Python model of window and pool; its tree against the paper's mask."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import parallel_pieces

from specjax import accept, decode, drafters, rng, sampling, testing, tree
from specjax.drafters.parallel import lookahead
from specjax.errors import UserError
from specjax.models import lm
from specjax.types import Context, ModelParams

pytestmark = pytest.mark.fast

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "lookahead": ("lookahead", {"window": 2, "ngram": 3, "candidates": 2}, ("deterministic",)),
}

V, W, N, G = 5, 3, 4, 2
ROWS = N - 1
TARGET = testing.tabular(V)
TABLE = np.asarray(testing.random_table(0, V))
PROMPTS = [[2, 1], [4], [4, 0, 3, 3, 1, 0, 3, 3], [1, 2, 0]]
NEW = [24, 3, 24, 17]
TEMPERATURES = [0.0, 0.0, 1.0, 0.7]
LONGEST = max(map(len, PROMPTS)) + max(NEW)
copies = jax.jit(parallel_pieces.pieces, static_argnums=3)


@functools.cache
def made(**keys):
    return drafters.make("lookahead", TARGET, **({"window": W, "ngram": N, "candidates": G} | keys))


def begin(drafter, table, temperature):
    packed, lengths = decode.pack_prompts(PROMPTS)
    return decode.prefill(
        TARGET,
        drafter,
        ModelParams(jnp.asarray(table)),
        packed,
        lengths,
        rng.row_keys(0, len(PROMPTS)),
        max_len=LONGEST,
        limit=lengths + jnp.asarray(NEW),
        sampling=sampling.make_sampling(len(PROMPTS), temperature),
    )


def remember(pool, key, gram):
    """Makes ``gram`` the newest of its key: newest first, no duplicates, at most G."""
    held = pool.setdefault(key, [])
    if gram in held:
        held.remove(gram)
    pool[key] = [gram, *held][:G]


def as_array(pool):
    full = np.full((V, G, ROWS), -1)
    for key, grams in pool.items():
        full[key, : len(grams)] = grams
    return full


def test_the_pool_equals_plain_lists():
    random, rows = np.random.default_rng(0), 40
    pool = jnp.full((rows, V, G, ROWS), -1, jnp.int32)
    plain: list[dict] = [{} for _ in range(rows)]
    insert = jax.jit(lookahead.insert)
    for _ in range(60):
        keys = random.integers(0, V + 1, rows)
        # Few different n-grams, so that equal ones occur often.
        grams = random.integers(0, 2, (rows, ROWS)) * random.integers(0, 2)
        pool = insert(pool, jnp.asarray(keys), jnp.asarray(grams))
        for row in range(rows):
            if keys[row] < V:
                remember(plain[row], keys[row], grams[row].tolist())
    np.testing.assert_array_equal(pool, [as_array(p) for p in plain])


def new_columns(text):
    """New columns of the window: pieces of the text."""
    places = jnp.arange(len(text) - 1, len(text) - 1 + W)[None]
    padded = jnp.asarray([text + [0] * (LONGEST - len(text))])
    return np.asarray(copies(padded, jnp.asarray([len(text)]), places, ROWS))[0].tolist()


class Plain:
    """One row of the method: columns of the window as lists, the pool as a dictionary."""

    def __init__(self, prompt):
        self.columns, self.pool = new_columns(prompt), {}
        self.filled, self.length = 1, len(prompt)

    def propose(self, text):
        new = len(text) - self.length
        if new:
            self.columns = (self.columns[new:] + new_columns(text)[-new:])[-W:]
        self.columns[0][0] = text[-1]
        self.length = len(text)

    def update(self, before):
        """``before`` is the token before the pending one: the model depends on two tokens."""
        outputs, first = [], [column[0] for column in self.columns]
        for index, column in enumerate(self.columns):
            path = [before, *first[: index + 1], *column[1 : self.filled]]
            outputs.append(int(np.argmax(TABLE[path[-2], path[-1]])))
        if self.filled < ROWS:
            for column, token in zip(self.columns, outputs, strict=True):
                column[self.filled] = token
            self.filled += 1
            return
        for column, token in zip(self.columns, outputs, strict=True):
            remember(self.pool, column[0], [*column[1:], token])
        self.columns = [
            [*column[1:], token] for column, token in zip(self.columns, outputs, strict=True)
        ]
        self.length += 1


def test_window_and_pool_equal_a_plain_model():
    """Every round of ragged rows, greedy and sampled: the candidates, the window and the pool."""
    params, texts = ModelParams(jnp.asarray(TABLE)), [list(p) for p in PROMPTS]
    plain, accepted = [Plain(p) for p in PROMPTS], 0
    start = begin(made(), TABLE, TEMPERATURES)
    state = start
    for state, info in decode.stream(TARGET, made(), accept.load("recursive"), params, start):
        tokens, valid = np.asarray(info.draft.tokens), np.asarray(info.draft.valid)
        assert not valid[:, G * ROWS :].any()
        for row, text in enumerate(texts):
            emitted = np.asarray(info.tokens)[row, : int(info.emitted[row])].tolist()
            if not emitted:
                continue
            plain[row].propose(text)
            grams = as_array(plain[row].pool)[text[-1]]
            np.testing.assert_array_equal(tokens[row, : G * ROWS].reshape(ROWS, G).T, grams)
            np.testing.assert_array_equal(
                tokens[row, G * ROWS :], np.ravel(plain[row].columns, "F")[1:]
            )
            distinct = {
                tuple(gram[:depth])
                for gram in grams.tolist()
                for depth in range(1, N)
                if gram[0] >= 0
            }
            assert valid[row].sum() == len(distinct)
            plain[row].update((text[-2:-1] or [V])[0])
            text += emitted
            accepted += len(emitted) - 1
            np.testing.assert_array_equal(state.draft.window[row].T, plain[row].columns)
            assert int(state.draft.filled[row]) == plain[row].filled
            np.testing.assert_array_equal(state.draft.pool[row], as_array(plain[row].pool))
    lengths = [len(p) for p in PROMPTS]
    assert [len(t) - n for t, n in zip(texts, lengths, strict=True)] == NEW
    assert decode.outputs(state, lengths) == [t[n:] for t, n in zip(texts, lengths, strict=True)]
    assert accepted > 5
    expected = decode.autoregressive(
        TARGET, params, begin(made(), TABLE, TEMPERATURES), max_steps=24
    )
    assert decode.outputs(expected, lengths)[:2] == decode.outputs(state, lengths)[:2]


def test_the_tree_equals_the_papers_mask():
    """With a real decoder the logits after a node equal those of its visible tokens as text."""
    target, params = testing.tiny("llama", 0)
    drafter = drafters.make("lookahead", target, window=W, ngram=N, candidates=G)
    random, texts = np.random.default_rng(0), [[3, 1, 4], [1, 5, 9, 2, 6]]
    packed, lengths = decode.pack_prompts(texts)
    context = Context(packed, lengths, sampling.make_sampling(2, 0.0))
    pair = ModelParams(params)
    state = drafter.init(pair, context, None, 32)
    pool = random.integers(0, 32, state.pool.shape)
    # The candidates share their first token.
    pool[:, :, 1, 0] = pool[:, :, 0, 0]
    state = state.replace(
        pool=jnp.asarray(pool, jnp.int32),
        window=jnp.asarray(random.integers(0, 32, state.window.shape), jnp.int32),
    )
    draft, state = jax.jit(drafter.propose)(pair, None, context, state)
    apply = jax.jit(target.apply)
    cache = target.init_cache(2, 32)
    cache = jax.jit(target.commit)(cache, apply(params, packed, cache)[1], lengths - 1)
    block = jnp.concatenate([context.pending[:, None], draft.tokens], 1)
    got = np.asarray(apply(params, block, cache, tree.block_layout(draft))[0].logits)

    rows, where = [], []
    for row, text in enumerate(texts):
        view = np.asarray(state.window)[row]
        assert view[0, 0] == text[-1]
        for r in range(ROWS):
            for c in range(W):
                node = r * W + c and G * ROWS + r * W + c
                rows.append([*text, *view[0, 1 : c + 1], *view[1 : r + 1, c]])
                where.append((row, node))
        for g in range(G):
            for depth in range(ROWS):
                node = 1 + depth * G + g
                if depth == 0 and g == 1:
                    # Merged with the equal node of the first candidate.
                    assert not draft.valid[row, node - 1]
                    continue
                rows.append([*text, *pool[row, text[-1], g, : depth + 1]])
                where.append((row, node))
    plain = jax.jit(functools.partial(lm.forward, target))(
        params, jnp.asarray([r + [0] * (16 - len(r)) for r in rows])
    )
    for index, (row, node) in enumerate(where):
        np.testing.assert_allclose(
            got[row, node], plain.logits[index, len(rows[index]) - 1], atol=1e-4
        )
    # Per row: the pending token and all nodes except the merged one.
    assert len(where) == 2 * drafter.nodes


def test_periodic_text_is_emitted_in_whole_ngrams():
    """N - 1 accepted tokens and the bonus token: N per round, where the original gives N - 1."""
    table = np.zeros((V + 1, V, V), np.float32)
    table[:, np.arange(V), (np.arange(V) + 1) % V] = 9
    state, params = begin(made(), table, 0.0), ModelParams(jnp.asarray(table))
    lengths = [len(p) for p in PROMPTS]
    state, records = decode.generate(
        TARGET, made(), accept.load("recursive"), params, state, max_steps=24
    )
    for prompt, text, new in zip(PROMPTS, decode.outputs(state, lengths), NEW, strict=True):
        assert text == [(prompt[-1] + 1 + i) % V for i in range(new)]
    emitted = np.asarray(records.emitted)
    assert (emitted.max(0)[[0, 2, 3]] == N).all()
    # After a few rounds the pool is filled.
    assert emitted[5:, 0][emitted[5:, 0] > 0].mean() > 2


def test_pool_from_prompt():
    drafter = made(pool_from_prompt=True)
    packed, lengths = decode.pack_prompts(PROMPTS)
    context = Context(packed, lengths, sampling.make_sampling(len(PROMPTS)))
    state = jax.jit(drafter.init, static_argnums=3)(
        ModelParams(jnp.asarray(TABLE)), context, None, 40
    )
    for row, prompt in enumerate(PROMPTS):
        pool = {}
        for start in range(len(prompt) - ROWS):
            remember(pool, prompt[start], prompt[start + 1 : start + N])
        np.testing.assert_array_equal(state.pool[row], as_array(pool))
    assert (state.pool >= 0).any()
    short = drafter.init(
        ModelParams(TABLE),
        Context(packed[:, :2], jnp.minimum(lengths, 2), context.sampling),
        None,
        40,
    )
    assert (short.pool < 0).all()


def test_sizes():
    drafter = drafters.make("lookahead", testing.tabular(9))
    assert (drafter.nodes, drafter.depth) == (4 * 14 - 1, 4)
    drafter = drafters.make("lookahead", TARGET, window=1, ngram=2, candidates=1)
    assert (drafter.nodes, drafter.depth) == (1, 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"window": 0}, "window is 0; it must be a whole number >= 1"),
        ({"ngram": 1}, "ngram is 1; it must be a whole number >= 2"),
        ({"candidates": 0}, "candidates is 0; it must be a whole number >= 1"),
        ({"pool_from_prompt": 1.5}, "pool_from_prompt is 1.5; it must be True or False"),
    ],
)
def test_invalid_keys_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        drafters.make("lookahead", TARGET, **keys)
