"""The suffix automaton against substring scans, and ``sam`` against a plain Python model."""

from __future__ import annotations

import itertools
import types

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import lookup_automaton as _automaton

from specjax import ModelParams, accept, decode, make_sampling, row_keys
from specjax.data import datastore
from specjax.drafters import none
from specjax.drafters.lookup import sam
from specjax.errors import UserError
from specjax.testing import tabular
from specjax.types import Context

pytestmark = pytest.mark.fast

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "sam": (
        "sam",
        {"gamma": 2, "min_match": 1, "max_ngram": 3, "bias": 1, "datastore": "@datastore"},
        ("chain",),
    ),
}
ROWS, SLOTS, VOCAB, GAMMA = 240, 32, 4, 4
DOCUMENTS = (
    [0, 1, 2, 0, 1, 3, 3, 2, 1],
    [2, 2, 1, 0, 1, 2, 0, 1, 3, 0],
    [3],
    [1, 2, 0, 1],
    [1, 0, 1, 2, 0],
)


def texts(seed, rows=ROWS):
    """Random texts of 1 to 4 different tokens; every second one is periodic."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1 << 30, (rows, SLOTS)) % rng.integers(1, VOCAB + 1, rows)[:, None]
    copied = rng.integers(1, SLOTS, rows)
    for row in range(0, rows, 2):
        tokens[row] = np.resize(tokens[row, : copied[row]], SLOTS)
    return tokens


def matches(text):
    """(size, end) of the first occurrence of each suffix that occurred before, longest first."""
    n = len(text)
    for size in range(n - 1, 0, -1):
        end = next((e for e in range(size, n) if text[e - size : e] == text[n - size :]), None)
        if end is not None:
            yield size, end


def chosen(text, ahead, least):
    """The size and the end of the match that is used, and the longest size."""
    usable = [m for m in matches(text) if m[0] >= least]
    if not usable:
        return 0, None, 0
    size, end = next((m for m in usable if len(text) - m[1] >= ahead), usable[0])
    return size, end, usable[0][0]


@jax.jit
def grow(tokens, stops):
    """The occurrences after every token, with two settings; a row stops at its own length."""

    def one(automaton, length):
        automaton = _automaton.extend(automaton, tokens, jnp.minimum(length, stops))
        seen = [_automaton.occurrence(automaton, *keys) for keys in ((1, 1), (GAMMA, 2))]
        return automaton, (*seen, automaton.count)

    return jax.lax.scan(one, _automaton.empty(*tokens.shape), jnp.arange(1, SLOTS + 1))


@pytest.fixture(scope="module")
def grown():
    tokens, stops = texts(0), np.random.default_rng(1).integers(1, SLOTS + 1, ROWS)
    automaton, seen = grow(jnp.asarray(tokens, jnp.int32), jnp.asarray(stops, jnp.int32))
    return tokens, stops, jax.tree.map(np.asarray, automaton), jax.tree.map(np.asarray, seen)


def test_matches_equal_a_substring_scan(grown):
    tokens, stops, automaton, (longest, ahead, count) = grown
    pairs = 0
    for row in range(ROWS):
        for n in range(1, stops[row] + 1):
            text = tokens[row, :n].tolist()
            for match, keys in ((longest, (1, 1)), (ahead, (GAMMA, 2))):
                size, end, most = chosen(text, *keys)
                assert (match.size[n - 1, row], match.longest[n - 1, row]) == (size, most), text
                assert end is None or match.end[n - 1, row] == end, text
            assert count[n - 1, row] <= max(2 * n - 1, 2)
            pairs += 1
    assert pairs > 3000
    assert (automaton.read == stops).all()


def test_it_accepts_exactly_the_substrings(grown):
    tokens, stops, automaton, _ = grown
    for row in range(24):
        text, edges = tokens[row, : stops[row]].tolist(), automaton.edges[row]
        taken = edges[edges[:, _automaton.STATE] >= 0]
        step = {(s, t): target for s, t, target, _ in taken.tolist()}
        # No key occurs twice.
        assert len(step) == len(taken) <= max(3 * len(text) - 4, 2)
        for size in range(1, 5):
            inside = {tuple(text[i : i + size]) for i in range(len(text) - size + 1)}
            for word in itertools.product(range(VOCAB), repeat=size):
                state = 0
                for token in word:
                    state = step.get((state, token))
                    if state is None:
                        break
                assert (state is not None) == (word in inside)


def test_a_row_does_not_depend_on_the_batch(grown):
    """A batch of one, for which XLA compiles a very different program."""
    tokens, _, automaton, _ = grown
    for row in (int(np.argmax(grown[1])), int(np.argmin(grown[1]))):
        text, stop = (
            jnp.asarray(tokens[row : row + 1], jnp.int32),
            jnp.asarray(grown[1][row : row + 1], jnp.int32),
        )
        alone = jax.jit(_automaton.extend)(_automaton.empty(1, SLOTS), text, stop)
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(automaton), strict=True):
            assert (np.asarray(a)[0] == b[row]).all()


def stored(text, max_ngram, least):
    """The datastore's continuation of the longest match, and the size of the match."""
    for size in range(min(max_ngram, len(text)), least - 1, -1):
        continuations = sorted(
            [*document[end:], -1]
            for document in DOCUMENTS
            for end in range(size, len(document) + 1)
            if document[end - size : end] == text[-size:]
        )
        if continuations and len(continuations[-1]) > 1:
            middle, last = continuations[len(continuations) // 2], continuations[-1]
            return [t for t in (middle if len(middle) > 1 else last)[:GAMMA] if t >= 0], size
    return [], 0


def drafted(text, min_match, max_ngram, bias, warm):
    size, end, longest = chosen(text, GAMMA, min_match)
    mine = text[end : end + GAMMA] if size else []
    others, other_size = stored(text, max_ngram, min_match) if warm else ([], 0)
    own = not warm or (longest and longest >= other_size - bias)
    return mine if own else others


@pytest.mark.parametrize(
    ("min_match", "bias", "warm"), [(1, 5, False), (2, 1, True), (2, 5, False), (1, 0, True)]
)
def test_drafts_equal_a_plain_model_for_any_growth_of_the_text(min_match, bias, warm):
    """Between two drafts the text may grow by any number of tokens, with other drafters too."""
    rng, rows = np.random.default_rng(3), 100
    tokens, length = texts(2, rows), rng.integers(1, 9, rows)
    store = datastore.build(DOCUMENTS) if warm else None
    keys = {"gamma": GAMMA, "min_match": min_match, "max_ngram": 6, "bias": bias}
    drafter = sam.make(tabular(VOCAB), datastore=store, **keys)
    params, settings = ModelParams({}, drafter.init_params(None)), make_sampling(rows)

    def context():
        text = np.where(
            np.arange(SLOTS) < length[:, None], tokens, rng.integers(-1, VOCAB, tokens.shape)
        )
        return Context(jnp.asarray(text, jnp.int32), jnp.asarray(length, jnp.int32), settings)

    state = drafter.init(params, context(), None, SLOTS)
    propose, full, from_store = jax.jit(drafter.propose), 0, 0
    for _ in range(8):
        draft, state = propose(params, None, context(), state)
        proposed, valid = np.asarray(draft.tokens), np.asarray(draft.valid)
        for row in range(rows):
            text = tokens[row, : length[row]].tolist()
            expected = drafted(text, min_match, 6, bias, warm)
            assert proposed[row][valid[row]].tolist() == expected, text
            assert not valid[row, len(expected) :].any()
            full += len(expected) == GAMMA
            from_store += expected != drafted(text, min_match, 6, bias, False)
        length = np.minimum(length + rng.integers(0, 6, rows), SLOTS)
    assert full > 200 and (from_store > 50) == warm


@pytest.mark.slow
def test_decoding_is_plain_and_finished_rows_keep_their_state():
    target = tabular(3)
    drafter, rule = sam.make(target, gamma=3), accept.load("chain")
    params = ModelParams(cases.table(0), {})
    packed, lengths = decode.pack_prompts([[0, 1, 2, 0, 1], [1], [2, 2, 0], [0, 0]])
    settings = make_sampling(4, temperature=[0.0, 0.0, 1.0, 0.0])
    limit = lengths + jnp.asarray([2, 12, 12, 9])

    def begin(drafter):
        return decode.prefill(
            target,
            drafter,
            params,
            packed,
            lengths,
            row_keys(0, 4),
            max_len=20,
            limit=limit,
            sampling=settings,
        )

    state, rounds = begin(drafter), []
    for _ in range(14):
        state, _ = decode.generate(target, drafter, rule, params, state, max_steps=1)
        rounds.append(
            (np.asarray(state.done), [np.asarray(x) for x in jax.tree.leaves(state.draft)])
        )
    for (done, _), (_, before), (_, after) in zip(rounds, rounds[1:], rounds[2:], strict=False):
        # A row reads its last tokens in the round after it finished.
        for a, b in zip(before, after, strict=True):
            assert (a[done] == b[done]).all()
    plain = decode.autoregressive(target, params, begin(none.make(target)), max_steps=20)
    assert state.done.all()
    for row in (0, 1, 3):
        n = int(limit[row])
        assert (state.tokens[row, :n] == plain.tokens[row, :n]).all()
        text = jnp.asarray(state.tokens[row : row + 1])
        read = state.draft.read[row : row + 1]
        again = _automaton.extend(_automaton.empty(1, state.draft.states.shape[1] // 2), text, read)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state.draft), strict=True):
            assert (a[0] == b[row]).all()


def test_learn_adds_the_outputs_to_the_datastore():
    drafter = sam.make(tabular(VOCAB), gamma=2, memory=16, min_match=1)
    params = ModelParams({}, drafter.init_params(None))
    assert params.draft == {} and drafter.rare.learn is not None
    state = types.SimpleNamespace(
        tokens=np.array([[0, 1, 2, 3, 0], [2, -1, -1, -1, -1]]), length=np.array([5, 1])
    )
    # The output of the first row is 1 2 3 0.
    params = params._replace(draft=drafter.rare.learn(params, state, [1, 1]))
    text = Context(jnp.asarray([[2, 3], [3, 2]]), jnp.asarray([1, 2]), make_sampling(2))
    draft, _ = jax.jit(drafter.propose)(params, None, text, drafter.init(params, text, None, 2))
    assert draft.tokens.tolist() == [[3, 0], [3, 0]] and draft.valid.all()


def test_invalid_keys_are_refused():
    for keys, message in [
        ({"gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        ({"min_match": 0}, "min_match is 0"),
        ({"bias": -1}, "bias is -1; it must be a whole number >= 0"),
        ({"min_match": 17}, "min_match is 17 and max_ngram 16: a datastore could never match"),
        (
            {"max_ngram": 40, "datastore": datastore.build([[1]])},
            "max_ngram is 40 and the datastore's reach 32",
        ),
        (
            {"datastore": datastore.build([[7, 7]])},
            "the datastore has the token id 7 and the target 4 tokens",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            sam.make(tabular(VOCAB), **keys)
