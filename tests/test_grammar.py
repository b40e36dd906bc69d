"""Grammars: automata over tokens, what they allow along paths and texts, and real tokenizers."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commandline import GENERATE

from specjax import accept, decode, drafters, generate_text, logit_maps, rng, sampling
from specjax.errors import UserError
from specjax.generation.loading import Model
from specjax.generation.refill import decode_all
from specjax.logit_maps import grammar
from specjax.models.token_bytes import TokenBytes
from specjax.testing import random_table, tabular
from specjax.testing.laws import mapped_logits
from specjax.types import ModelParams

pytestmark = pytest.mark.fast

V = 7
END = 6
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
}


def table(seed: int, states: int = 9) -> np.ndarray:
    """A random automaton: two of five moves are missing, and some states lead nowhere."""
    draw = np.random.default_rng(seed)
    moves = draw.integers(0, states, (states, V))
    return np.where(draw.random((states, V)) < 0.6, moves, -1)


def ways(moves: np.ndarray, final: set[int], text: list[int]) -> set[int] | None:
    """The tokens that may follow ``text`` from state 0: by search for a final state."""

    def reaches(state: int, seen: frozenset[int] = frozenset()) -> bool:
        later = {int(x) for x in moves[state, :END] if x >= 0} - seen
        return state in final or any(reaches(x, seen | {state}) for x in later)

    state = 0
    for token in text:
        if token == END:
            return set(range(V)) if state in final else None
        state = int(moves[state, token])
        if state < 0:
            return None
    allowed = {t for t in range(END) if moves[state, t] >= 0 and reaches(int(moves[state, t]))}
    return allowed | ({END} if state in final else set())


@pytest.mark.parametrize("seed", [0, 1, 2, 4])
def test_an_automaton_allows_what_can_still_end(seed):
    moves, final = table(seed), {3, 4 + seed}
    made = grammar.of_table(moves, 0, final, (END,))
    draw, walked = np.random.default_rng(seed), 0
    for _ in range(60):
        text, state = [], made.start
        for _ in range(12):
            right = ways(moves, final, text)
            kinds = made.following[state] >= 0
            found = {token for token in range(V) if kinds[made.classes[token]]}
            assert found == right
            text.append(int(draw.choice(sorted(found))))
            state, walked = made.following[state, made.classes[text[-1]]], walked + 1
    assert walked == 720 and made.following.shape[1] <= V


def maps_of(automata, prompts):
    how = sampling.make_sampling(len(automata), grammar=automata, vocab_size=V)
    lengths = jnp.asarray([len(prompt) for prompt in prompts])
    return sampling.after_prompt(how, lengths).maps


PROMPTS = [[1, 1, 2], [4], [5, 6, 0, 3, 0, 3]]
# A tree: two children of the pending token, a chain below the first, and a node below it.
PATHS = [[], [0], [1], [0, 2], [0, 2, 3], [0, 4]]


@jax.enable_x64(True)
def test_each_row_and_each_node_has_the_state_of_its_path():
    automata = [grammar.of_table(table(seed), 0, {3, 4 + seed}, (END,)) for seed in (0, 1)]
    maps = maps_of([automata[0], None, automata[1]], PROMPTS)
    draw = np.random.default_rng(1)
    outputs = [[], [2, 2, 6], []]
    for row in (0, 2):
        state, own = automata[row // 2].start, automata[row // 2]
        for _ in range(3):
            kinds = np.flatnonzero(own.following[state][own.classes[:END]] >= 0)
            outputs[row].append(int(draw.choice(kinds)))
            state = own.following[state, own.classes[outputs[row][-1]]]
    tokens = np.full((3, 12), 4, np.int32)
    texts = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    length = jnp.asarray([len(text) for text in texts])
    nodes = draw.integers(0, V, (3, 5))
    logits = draw.normal(size=(3, 6, V))
    visible = np.array([[node in path for node in range(5)] for path in PATHS])

    @jax.jit
    def computed(maps, length):
        read = logit_maps.read(maps, jnp.asarray(tokens), length, V)
        given = (jnp.asarray(logits), jnp.asarray(nodes), jnp.asarray(visible)[None])
        return logit_maps.mapped(maps, read, *given)

    whole = np.asarray(computed(maps, length))
    # What was read in an earlier round is not read again.
    early = logit_maps.advanced(maps, jnp.asarray(tokens), length - 2)
    np.testing.assert_array_equal(whole, computed(early, length))
    for row in range(3):
        for place, path in enumerate(PATHS):
            written = outputs[row] + [int(nodes[row, node]) for node in path]
            right = mapped_logits(maps, row, logits[row, place], PROMPTS[row], written)
            np.testing.assert_allclose(whole[row, place], right, rtol=1e-12)
    assert np.isneginf(whole[[0, 2]]).any() and np.isfinite(whole[1]).all()
    given = maps, jnp.asarray(logits), jnp.asarray(tokens[:, :6])
    along = jax.jit(logit_maps.along_text)(*given)
    for row, prompt in enumerate(PROMPTS):
        for place in range(len(prompt) - 1, 6):
            output = tokens[row, len(prompt) : place + 1].tolist()
            right = mapped_logits(maps, row, logits[row, place], prompt, output)
            np.testing.assert_allclose(along[row, place], right, rtol=1e-12)


EXPRESSIONS = (
    "a(bc)?",
    "(ab|a)é?",
    "a*b+",
    "(abc)*",
    "[^b]{0,3}",
    "(a|b(c|é)?){1,2}",
    "(?:a|bc)|c",
    "",
    "a.c?",
)


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_the_texts_of_an_expression_are_those_of_python(pattern):
    """All texts of up to four bytes, in every division into tokens."""
    pytest.importorskip("outlines_core")
    vocabulary = (b"a", b"b", b"c", "é".encode()[:1], "é".encode()[1:], b"ab", b"bc", b"a", None)
    made = grammar.of_regex(pattern, TokenBytes(pattern, vocabulary), 9, (8,))

    def allowed(text):
        state = made.start
        for token in text:
            state = made.following[state, made.classes[token]]
            if state < 0:
                return set()
        return set(np.flatnonzero(made.following[state][made.classes] >= 0).tolist())

    texts, seen = [[]], 0
    while texts:
        text = texts.pop()
        data, now = b"".join(vocabulary[token] for token in text), allowed(text)
        try:
            matches = re.fullmatch(pattern, data.decode()) is not None
        except UnicodeDecodeError:
            matches = False
        assert (8 in now) == matches, (pattern, data)
        seen += matches
        for token in range(8):
            longer = data + vocabulary[token]
            if len(longer) <= 4:
                texts.append([*text, token])
    assert seen


def bytes_of(*texts: bytes | None) -> TokenBytes:
    return TokenBytes("own", tuple(texts), ends=(len(texts) - 1,))


def test_an_expression_over_bytes():
    """A token may be a part of a character, and two tokens may have the same bytes."""
    pytest.importorskip("outlines_core")
    tokens = bytes_of(b"a", b"ab", b"\xc3", b"\xa9", b"a", b"b", None)
    made = grammar.of_regex("(ab|a)é?", tokens, 8, (6,))
    accepted = []

    def walk(text, state):
        for token in np.flatnonzero(made.following[state][made.classes] >= 0):
            if token == 6:
                accepted.append(text)
            else:
                walk([*text, int(token)], made.following[state, made.classes[token]])

    walk([], made.start)
    spelled = sorted(b"".join(tokens.tokens[i] for i in text) for text in accepted)
    # "a" is token 0 or 4, "ab" is token 1 or two tokens; the special token 7 is never allowed.
    assert spelled == sorted(2 * [b"a"] + 3 * [b"ab"] + 2 * [b"a\xc3\xa9"] + 3 * [b"ab\xc3\xa9"])
    assert made.classes[0] == made.classes[4]


WRONG = {
    "cannot be used: Failed to build DFA": lambda own: grammar.of_regex("(((", own, 4, (3,)),
    "'a)|(b' cannot be used": lambda own: grammar.of_regex("a)|(b", own, 4, (3,)),
    "missing tokens": lambda own: grammar.of_regex("zz", own, 4, (3,)),
    "needs ids that end a text": lambda own: grammar.of_regex("a", own, 4, ()),
    "cannot be used: Expected a valid JSON": lambda own: grammar.of_schema("{'a'", own, 4, (3,)),
    "x.json cannot be read": lambda own: grammar.of_setting("x.json", own, 4, (3,)),
    "grammar is 3; it must be": lambda own: grammar.of_setting(3, own, 4, (3,)),
    "has no tokenizer": lambda own: grammar.of_setting("a", None, 4, (3,)),
    "has no state 5": lambda own: grammar.of_table(np.zeros((2, 4)), 5, (1,), (3,)),
    "no text of this vocabulary": lambda own: grammar.of_table(-np.ones((2, 4)), 0, (1,), (3,)),
    "must be an automaton": lambda own: sampling.make_sampling(2, grammar="a", vocab_size=4),
    "grammar has 1 entries": lambda own: sampling.make_sampling(2, grammar=[None], vocab_size=4),
    "grammar needs the size": lambda own: sampling.make_sampling(1, grammar=TINY),
    "made for 4 tokens, and vocab_size is 5": lambda own: sampling.make_sampling(
        1, grammar=TINY, vocab_size=5
    ),
    "all its tokens are banned": lambda own: sampling.make_sampling(
        1, grammar=TINY, vocab_size=4, banned=(1,)
    ),
    "wait for min_new_tokens": lambda own: sampling.make_sampling(
        1, grammar=TINY, vocab_size=4, min_new_tokens=2, end_ids=(3,)
    ),
}
# The text "1", then the end.
TINY = grammar.of_table(np.array([[-1, 1, -1, -1], [-1, -1, -1, -1]]), 0, (1,), (3,))


@pytest.mark.parametrize("message", WRONG)
def test_wrong_grammars_are_one_line(message):
    if "cannot be used" in message or "missing tokens" in message or "needs ids" in message:
        pytest.importorskip("outlines_core")
    with pytest.raises(UserError, match=re.escape(message)) as error:
        WRONG[message](bytes_of(b"a", b"b", b"c", None))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("moves", "ends", "message"),
    [
        ([[2, -1]], [1], "must have a row for each state"),
        ([1, -1], [1], "must have a row for each state"),
        ([[0, -1]], [2], "ids that end a text are [2] of 2 tokens"),
    ],
)
def test_wrong_tables_are_one_line(moves, ends, message):
    with pytest.raises(UserError, match=re.escape(message)):
        grammar.of_table(np.array(moves), 0, (0,), ends)


def test_a_target_with_another_vocabulary(stories):
    how = sampling.make_sampling(1, grammar=TINY, vocab_size=4)
    given = (stories.lm, drafters.make("none", stories.lm), ModelParams(stories.params))
    with pytest.raises(UserError, match="grammar was made for 4 tokens, and the target has 512"):
        decode.prefill(
            *(*given, *decode.pack_prompts([[1]]), rng.row_keys(0, 1)), max_len=4, sampling=how
        )


TEXTS = ["Once upon a time", "Tom had a", "The little girl liked to", "One day, a big"]
PATTERN = r" ?[a-z]{1,9} is [0-9]{1,3}( and [a-z]{1,6}){0,2}\."
METHODS = {
    "forced": ("forced", {}),
    "prompt_lookup": ("prompt_lookup", {"min_ngram": 1}),
    "draft model": ("draft_model", {"gamma": 3}),
    "tree": ("draft_tree", {"tree": "3x2x1", "siblings": "top_k"}),
    "dynamic": ("dynamic_tree", {"nodes": 10, "depth": 3, "top_k": 3}),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_every_text_matches_and_greedy_ones_are_those_of_plain_decoding(
    method, temperature, stories
):
    pytest.importorskip("outlines_core")
    name, keys = METHODS[method]
    model, prompts = (
        stories.lm,
        [[1, *stories.tokenizer.encode(text, add_special_tokens=False).ids] for text in TEXTS],
    )
    if "draft" in name or "tree" in name:
        draw = np.random.default_rng(0)
        noise = lambda x: x * (1 + 0.3 * draw.normal(size=x.shape)).astype(x.dtype)  # noqa: E731
        keys = keys | {"model": model, "params": jax.tree.map(noise, stories.params)}
    drafter = drafters.make(name, model, **keys)
    params = ModelParams(stories.params, drafter.init_params(jax.random.key(0)))
    given = (model.token_bytes, model.vocab_size, (2,))
    schema = grammar.of_schema(SCHEMA, *given)
    automata = [grammar.of_regex(PATTERN, *given), schema, None, schema]
    packed, lengths = decode.pack_prompts(prompts)
    loop = {"max_steps": 64, "eos_id": 2}

    def begin():
        how = sampling.make_sampling(4, temperature, grammar=automata, vocab_size=512)
        limit = {"max_len": packed.shape[1] + 64, "limit": lengths + 64}
        args = (model, drafter, params, packed, lengths, rng.row_keys(0, 4))
        return decode.prefill(*args, **limit, sampling=how)

    rule = accept.load(accept.default_rule(drafter))
    state, _ = decode.generate(model, drafter, rule, params, begin(), **loop)
    outputs = decode.outputs(state, [len(prompt) for prompt in prompts])
    for row in (0, 1, 3):
        if outputs[row][-1] != 2:
            continue
        text = b"".join(model.token_bytes.tokens[i] for i in outputs[row][:-1]).decode()
        if row:
            found = json.loads(text)
            assert set(found) == {"name", "old"} and isinstance(found["old"], bool)
        else:
            assert re.fullmatch(PATTERN, text)
    assert sum(outputs[row][-1] == 2 for row in (0, 1, 3)) >= 2
    if not temperature:
        plain = decode.autoregressive(model, params, begin(), **loop)
        assert decode.outputs(plain, [len(prompt) for prompt in prompts]) == outputs


def test_texts_with_a_grammar(stories, tmp_path):
    pytest.importorskip("outlines_core")
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    model = Model(stories)
    texts = [
        generate_text(model, TEXTS[:2], max_new_tokens=60, grammar=each).completions
        for each in (SCHEMA, str(path))
    ]
    assert [each.text for each in texts[0]] == [each.text for each in texts[1]]
    for each in texts[0]:
        assert each.finish == "eos" and set(json.loads(each.text)) == {"name", "old"}


def test_a_new_row_begins_its_own_automaton():
    """Seven ragged prompts in two rows have the texts that they have side by side."""
    moves = np.where(np.random.default_rng(2).random((5, V)) < 0.7, np.arange(5)[:, None], -1)
    moves = np.where(moves >= 0, (moves + np.arange(V)) % 5, -1)
    automaton = grammar.of_table(moves, 0, {2}, (END,))
    target = tabular(V)
    parts = target, drafters.make("forced", target, gamma=2), accept.load("chain")
    given = (*parts, ModelParams(random_table(0, V), {}), [[i % 6] * (1 + i % 3) for i in range(7)])
    options = {"max_new_tokens": 9, "eos_id": END, "seed": 3, "grammar": automaton}
    texts = [
        [
            each.tokens
            for each in sorted(decode_all(*given, batch_size=rows, **options, vocab_size=V))
        ]
        for rows in (2, 7)
    ]
    assert texts[0] == texts[1] and any(text[-1] == END for text in texts[0])
    for text in texts[0]:
        state = automaton.start
        for token in text:
            state = automaton.following[state, automaton.classes[token]]
            assert state >= 0


def test_a_text_on_the_command_line(cli, data_dir, tmp_path):
    pytest.importorskip("outlines_core")
    model = (GENERATE, f"--config.target={data_dir / 'models' / 'stories260K'}")
    keys = ("--config.drafter.name=forced", "--config.max_new_tokens=24", "--config.prompt=Once")
    pattern = " [a-z]{3} was [0-9]{2}"
    status, _, err, workdir = cli(*model, *keys, f"--config.sampling.grammar={pattern}")
    assert status == 0, err
    result = json.loads((workdir / "results.json").read_text())
    assert re.fullmatch(pattern, result["texts"][0])
    assert result["rows"][0]["acceptance_rate"] > 0
    status, _, err, _ = cli(*model, *keys, "--config.sampling.grammar=(((", workdir=tmp_path / "b")
    assert status == 2 and err.splitlines()[-1].startswith("specjax: the grammar '(((' cannot be")
