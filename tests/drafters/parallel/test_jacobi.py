"""Jacobi decoding against a plain Python model of its guesses, and against plain decoding."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import parallel_pieces

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.errors import UserError
from specjax.types import Context, ModelParams

pytestmark = pytest.mark.fast

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "jacobi": ("jacobi", {"gamma": 2}, ("match",)),
}

V, GAMMA, WIDTH, ROOM = 6, 4, 5, 24
TARGET = testing.tabular(V)
TABLE = np.asarray(testing.random_table(0, V))
PROMPTS = [[2, 1], [4], [5, 0, 3, 3, 1], [1, 2, 5]]
NEW = [24, 3, 24, 17]
TEMPERATURES = [0.0, 1.0, 1.0, 0.7]
KEYS = rng.row_keys(7, len(PROMPTS))
copies = jax.jit(parallel_pieces.pieces, static_argnums=3)


@functools.cache
def made(**keys):
    return drafters.make("jacobi", TARGET, **({"gamma": GAMMA} | keys))


def begin(drafter, table, temperature):
    packed, lengths = decode.pack_prompts(PROMPTS)
    return decode.prefill(
        TARGET,
        drafter,
        ModelParams(jnp.asarray(table)),
        packed,
        lengths,
        jnp.copy(KEYS),
        max_len=WIDTH + ROOM,
        limit=lengths + jnp.asarray(NEW),
        sampling=sampling.make_sampling(len(PROMPTS), temperature),
    )


def run(drafter, table, temperature, rule="match"):
    """The outputs, and per row the number of rounds with at least one token."""
    state = begin(drafter, table, temperature)
    params = ModelParams(jnp.asarray(table))
    state, records = decode.generate(
        TARGET, drafter, accept.load(rule), params, state, max_steps=ROOM
    )
    rounds = (np.asarray(records.emitted) > 0).sum(0)
    return decode.outputs(state, [len(p) for p in PROMPTS]), rounds


def plain_outputs(table, temperature):
    state = begin(made(), table, temperature)
    state = decode.autoregressive(TARGET, ModelParams(jnp.asarray(table)), state, max_steps=ROOM)
    return decode.outputs(state, [len(p) for p in PROMPTS])


@functools.cache
def plain_tokens(seeded):
    """i32[B,P,V+1,V]: plain decoding's token at each text position after each two tokens."""
    places = WIDTH + ROOM + GAMMA + 1
    settings = sampling.make_sampling(len(PROMPTS), TEMPERATURES)
    rows = jnp.broadcast_to(jnp.asarray(TABLE), (len(PROMPTS), *TABLE.shape))
    if not seeded:
        return np.broadcast_to(np.argmax(rows, -1)[:, None], (len(PROMPTS), places, V + 1, V))
    probs = sampling.to_probs(rows, settings).reshape(len(PROMPTS), 1, -1, V)
    keys = rng.RowKeys(KEYS, jnp.zeros((), jnp.int32), jnp.zeros((len(PROMPTS),), jnp.int32))
    noise = jnp.broadcast_to(
        keys.at_position(jnp.arange(places))[..., None], (len(PROMPTS), places, probs.shape[2])
    )
    probs = jnp.broadcast_to(probs, (*noise.shape, V))
    return np.asarray(sampling.draw_rows(noise, probs)).reshape(len(PROMPTS), places, V + 1, V)


@pytest.mark.parametrize(("seeded", "start"), [(True, "last"), (False, "prompt")])
def test_guesses_equal_a_plain_model(seeded, start):
    """Ragged rows, greedy and sampled, round by round; the text equals plain decoding exactly."""
    drafter, params = made(seeded=seeded, start=start), ModelParams(jnp.asarray(TABLE))
    is_sampled = np.asarray(TEMPERATURES)[:, None, None, None] > 0
    after = np.where(is_sampled, plain_tokens(seeded), plain_tokens(False))
    texts, known = [list(p) for p in PROMPTS], [[] for _ in PROMPTS]
    right = 0
    for _, info in decode.stream(
        TARGET, drafter, accept.load("match"), params, begin(drafter, TABLE, TEMPERATURES)
    ):
        for row, text in enumerate(texts):
            emitted = np.asarray(info.tokens)[row, : int(info.emitted[row])].tolist()
            if not emitted:
                continue
            guess = list(known[row][:GAMMA])
            if start == "last":
                guess += [guess[-1] if guess else text[-1]] * (GAMMA - len(guess))
            else:
                places = jnp.arange(len(text), len(text) + GAMMA)[None]
                padded = jnp.asarray([text + [0] * (WIDTH + ROOM - len(text))])
                copied = copies(padded, jnp.asarray([len(text)]), places, 1)[0, :, 0].tolist()
                guess += copied[len(guess) :]
            assert np.asarray(info.draft.tokens)[row].tolist() == guess
            block = [*(text[-2:-1] or [V]), text[-1], *guess]
            outputs = [
                int(after[row, len(text) + i, block[i], block[i + 1]]) for i in range(GAMMA + 1)
            ]
            known[row] = outputs[len(emitted) :]
            text += emitted
            right += len(emitted) - 1
    assert [t[len(p) :] for t, p in zip(texts, PROMPTS, strict=True)] == plain_outputs(
        TABLE, TEMPERATURES
    )
    assert right > 5


def test_a_greedy_batch_equals_plain_decoding_with_at_most_one_round_per_token():
    texts, rounds = run(made(), TABLE, 0.0)
    assert texts == plain_outputs(TABLE, 0.0)
    assert (rounds <= NEW).all()


def test_parallel_text_converges_in_parallel():
    """Each token depends on the one before the last: a round after the first makes two right."""
    after = (np.arange(V) + 1) % V
    table = np.zeros((V + 1, V, V), np.float32)
    table[np.arange(V), :, after] = 5
    table[V, :, 0] = 5
    texts, rounds = run(made(), table, 0.0)
    assert texts == plain_outputs(table, 0.0)
    assert (rounds <= [1 + math.ceil((n - 1) / 2) for n in NEW]).all()


def test_seeded_guesses_need_fewer_rounds():
    """If the distribution ignores the context, a guess with the sampler's noise is always right."""
    table = np.broadcast_to(np.log(np.arange(1, V + 1, dtype=np.float32)), TABLE.shape)
    (one, few), (other, many) = (run(made(seeded=seeded), table, 1.0) for seeded in (True, False))
    assert one == other == plain_outputs(table, 1.0)
    # All outputs for positions beyond the accepted tokens are right: about (GAMMA + 2) / 2 tokens
    # per round, against 1.4 with the argmax.
    assert few[0] < 0.75 * many[0] and few[2] < 0.75 * many[2]


def test_rounds_of_another_drafter_may_pass():
    """The text may be longer than the last outputs reach, by any number of tokens."""
    drafter = made(gamma=3, seeded=False)
    lengths = jnp.asarray([6, 7, 8, 9, 10, 12])
    tokens = jnp.tile(jnp.arange(20), (6, 1)) % V
    context = Context(tokens, lengths, sampling.make_sampling(6, 0.0))
    state = drafter.init(ModelParams(TABLE), context, None, 20)
    state = state.replace(best=jnp.tile(jnp.asarray([5, 4, 3, 2]), (6, 1)), start=jnp.full((6,), 6))
    draft, state = drafter.propose(ModelParams(TABLE), None, context, state)
    assert draft.tokens.tolist() == [
        [5, 4, 3],
        [4, 3, 2],
        [3, 2, 2],
        [2, 2, 2],
        [3, 3, 3],
        [5, 5, 5],
    ]
    assert state.proposed.tolist() == lengths.tolist()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        ({"start": "first"}, "start is 'first'; it must be one of last, prompt"),
        ({"seeded": "no"}, "seeded is 'no'; it must be True or False"),
    ],
)
def test_invalid_keys_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        drafters.make("jacobi", TARGET, **keys)
