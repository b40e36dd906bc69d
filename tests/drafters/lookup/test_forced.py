"""Forced tokens: what a grammar leaves no choice about, against the automaton on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutants.maps import AUTOMATON

from specjax import accept, decode, drafters, make_sampling, rng
from specjax.logit_maps import grammar
from specjax.sampling import after_prompt
from specjax.testing import tabular, tiny
from specjax.types import Context, ModelParams

pytestmark = pytest.mark.fast

# Cases of the conformance matrix, see tests/cases.py, with ``cases.SETTINGS``.
MATRIX = {"forced": ("forced", {"gamma": 2}, ("chain",))}
VOCAB = 12


def drafted(automata, texts, prompts, gamma=4):
    """The drafts of texts, whose first ``prompts`` tokens are the prompt."""
    rows, width = len(texts), max(map(len, texts)) + 1
    tokens = np.full((rows, width), -1, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    size = len(automata[0].classes)
    how = make_sampling(rows, 0.0, grammar=automata, vocab_size=size)
    how = after_prompt(how, jnp.asarray(prompts))
    length = jnp.asarray([len(text) for text in texts])
    drafter = drafters.make("forced", tabular(size), gamma=gamma)
    draft, _ = jax.jit(drafter.propose)({}, None, Context(jnp.asarray(tokens), length, how), None)
    found = zip(np.asarray(draft.tokens), np.asarray(draft.valid), strict=True)
    return [row[valid].tolist() for row, valid in found]


def test_only_what_the_automaton_forces_is_drafted():
    # 0 is forced to be 1; after 1 there are two tokens; after 0 1 or the end.
    rows = [AUTOMATON, AUTOMATON, None, AUTOMATON]
    found = drafted(rows, [[2, 2], [0, 1], [0, 0], [1, 1, 0, 1]], [2, 1, 1, 1])
    assert found == [[1], [], [], []]


def test_a_chain_of_forced_tokens_ends_at_gamma_and_at_the_end():
    table = np.full((8, VOCAB), -1, np.int32)
    table[np.arange(7), np.arange(7) + 1] = np.arange(7) + 1
    automaton = grammar.of_table(table, 0, (7,), (0, 9))
    # Two ids end the text, so the end itself is not forced.
    assert drafted([automaton], [[5]], [1], gamma=3) == [[1, 2, 3]]
    assert drafted([automaton], [[5, 1, 2, 3, 4]], [1], gamma=9) == [[5, 6, 7]]
    single = grammar.of_table(table, 0, (7,), (9,))
    assert drafted([single], [[5, 1, 2, 3, 4]], [1], gamma=9) == [[5, 6, 7, 9]]


def test_the_beginnings_of_a_token_are_forced():
    texts = [b"a", b"ab", b"abc", b"b", b"x", None]
    table = np.full((2, 6), -1, np.int32)
    table[0, :3] = 1
    made = grammar.of_table(table, 0, (1,), (5,), texts)
    free, nothing = [-1] * 4, [5, -1, -1, -1]
    assert made.forced.tolist() == [free, [2, 1, 0, -1], nothing]
    # The longest, or the one that the text has most often; what is behind the text does not count.
    found = drafted([made] * 3, [[4, 4, 4], [0, 2, 0], [1, 0, 1]], [3, 3, 3], gamma=1)
    assert found == [[2], [0], [1]]
    table[0, 3] = 1
    assert grammar.of_table(table, 0, (1,), (5,), texts).forced.tolist() == [free, free, nothing]
    # Without the bytes two tokens are a choice.
    made = grammar.of_table(table[:, [0, 1, 5]], 0, (1,), (2,))
    assert made.forced.tolist() == [free, free, [2, -1, -1, -1]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_forced_tokens_are_all_accepted(temperature):
    """Rows with ragged prompts, in the loop: single tokens that are forced are never rejected."""
    target, params = tiny(vocab_size=VOCAB)
    draw = np.random.default_rng(0)
    table = np.full((30, VOCAB), -1, np.int32)
    for state in range(29):
        kinds = draw.choice(VOCAB - 1, 3 if state % 4 == 0 else 1, replace=False)
        table[state, kinds] = state + 1
    automaton = grammar.of_table(table, 0, (29,), (VOCAB - 1,))
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 1, 2]]
    packed, lengths = decode.pack_prompts(prompts)
    drafter = drafters.make("forced", target, gamma=5)
    given = (target, drafter, ModelParams(params, {}), packed, lengths, rng.row_keys(0, 4))
    how = make_sampling(4, temperature, grammar=automaton, vocab_size=VOCAB)
    state = decode.prefill(*given, max_len=48, sampling=how)
    stop = {"max_steps": 48, "eos_id": VOCAB - 1}
    state, records = decode.generate(*given[:2], accept.load("chain"), given[2], state, **stop)
    assert int(records.drafted.sum()) == int(records.accepted.sum()) > 60
    for ids in decode.outputs(state, [len(prompt) for prompt in prompts]):
        now = automaton.start
        for token in ids:
            now = automaton.following[now, automaton.classes[token]]
            assert now >= 0
        assert ids[-1] == VOCAB - 1 and len(ids) == 30
