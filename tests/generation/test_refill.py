"""Rows that are replaced from a queue: every text is the one that its prompt has alone."""

from __future__ import annotations

import cases
import jax
import numpy as np
import pytest
from decode_cases import arrays_of, made_up_state

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.errors import UserError
from specjax.generation import refill
from specjax.generation.refill import decode_all
from specjax.types import ModelParams

EOS = 2


def system(name, **keys):
    """A small real target, and a drafter with its rule."""
    case = cases.real("prompt_lookup")
    if name == "draft_model":
        model, params = cases.tiny("gpt2", 1, layers=1, vocab_size=cases.VOCAB, width=16)
        drafter = drafters.make(name, case.target, model=model, **keys)
    else:
        drafter = drafters.make(name, case.target, **keys)
        params = drafter.init_params(jax.random.key(0))
    rule = accept.load(accept.default_rule(drafter))
    return case.target, drafter, rule, ModelParams(case.params.target, params)


def alone(target, drafter, rule, params, prompts, limits, temperature, seed=5):
    """(text, rounds) of every prompt in a batch of one row."""
    texts = []
    for number, (ids, limit) in enumerate(zip(prompts, limits, strict=True)):
        packed, lengths = decode.pack_prompts([ids], max(map(len, prompts)))
        state = decode.prefill(
            *(target, drafter, params, packed, lengths, rng.row_keys(seed, [number])),
            max_len=packed.shape[1] + max(limits),
            limit=lengths + limit,
            sampling=sampling.make_sampling(1, temperature),
        )
        state, records = decode.generate(
            *(target, drafter, rule, params, state), max_steps=max(limits), eos_id=EOS
        )
        [text] = decode.outputs(state, lengths.tolist())
        texts.append((text, int((np.asarray(records.emitted) > 0).sum())))
    return texts


@pytest.mark.parametrize(
    ("name", "keys", "temperature"),
    [
        ("draft_model", {"gamma": 3}, 1.0),
        pytest.param(
            "draft_model", {"gamma": 3, "control": "heuristic:1"}, 1.0, marks=pytest.mark.slow
        ),
        pytest.param("sam", {"gamma": 3, "min_match": 1}, 0.0, marks=pytest.mark.slow),
        pytest.param("token_recycling", {"tree": "2x1", "top_k": 2}, 1.0, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_single_rows(name, keys, temperature):
    """Nine ragged prompts with limits of their own in three rows, with end-of-sequence tokens."""
    random = np.random.default_rng(4)
    prompts = [random.integers(0, 3, random.integers(1, 7)).tolist() for _ in range(9)]
    limits = random.integers(1, 5, 9).tolist()
    parts = system(name, **keys)
    run = decode_all(
        *parts,
        prompts,
        batch_size=3,
        max_new_tokens=limits,
        segment=2,
        eos_id=EOS,
        seed=5,
        temperature=temperature,
    )
    answers = list(run)
    assert sorted(each.number for each in answers) == list(range(9))
    texts, rounds = zip(*[(each.tokens, each.rounds) for each in sorted(answers)], strict=True)
    assert [*zip(texts, rounds, strict=True)] == alone(*parts, prompts, limits, temperature)
    assert any(text[-1] == EOS for text in texts) and any(text[-1] != EOS for text in texts)
    assert any(own < len(text) for own, text in zip(rounds, texts, strict=True))


def test_a_row_counts_its_own_rounds():
    """Plain decoding has a round for each token, whichever rows were there before."""
    target, table = testing.tabular(3), testing.random_table(0, 3)
    plain = drafters.make("none", target)
    parts = target, plain, accept.load("match"), ModelParams(table, {})
    prompts, limits = [[0, 1], [2], [1], [0], [2, 2]], [5, 2, 4, 1, 3]
    options = {"batch_size": 2, "max_new_tokens": limits, "segment": 3}
    answers = sorted(decode_all(*parts, prompts, **options))
    assert [(each.number, len(each.tokens)) for each in answers] == [*enumerate(limits)]
    assert [each.rounds for each in answers] == limits


def test_a_new_row_has_nothing_of_the_row_before():
    """Settings, limit, key, round, caches and the drafter's state, and no other row changes."""
    state, one = made_up_state(3, 0), made_up_state(1, 1)
    axes = tuple(0 for _ in jax.tree.leaves(state))
    before, new = arrays_of(state), arrays_of(one)
    after = arrays_of(refill._inserted(state, one, jax.numpy.asarray(1), axes))
    for name, array in after.items():
        assert np.array_equal(array[1:2], new[name]), name
        assert np.array_equal(array[::2], before[name][::2]), name


def test_nothing_is_compiled_again():
    parts = system("draft_model", gamma=2)
    prompts = [[1, 2], [0], [2, 1, 1], [1], [0, 1], [2]]
    keys = {"batch_size": 2, "max_new_tokens": 5, "segment": 2}
    list(decode_all(*parts, prompts, **keys))
    with jax.log_compiles(True), pytest.MonkeyPatch.context() as patch:
        compiled = []
        patch.setattr("logging.Logger.warning", lambda self, text, *a: compiled.append(text % a))
        list(decode_all(*parts, prompts, **keys))
    assert not [line for line in compiled if "Compiling jit(_" in line]


@pytest.mark.fast
def test_the_longest_text_is_that_of_one_prompt():
    """The longest prompt and the largest limit belong to different ones."""
    target, *rest = system("prompt_lookup", gamma=2)
    parts = (target._replace(max_positions=9), *rest)
    keys = {"batch_size": 1, "max_new_tokens": np.array([7, 3])}
    found = [each.tokens for each in decode_all(*parts, [[1], [1, 2, 0, 1, 2]], **keys)]
    assert [len(each) for each in found] == [7, 3]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"batch_size": 3}, "the batch size is 3 and there are 2 prompts; lower it"),
        ({"segment": 0}, "segment is 0; it must be a whole number >= 1"),
        ({"max_new_tokens": [3]}, "max_new_tokens has 1 numbers and there are 2 prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number >= 1"),
    ],
)
def test_errors(keys, message):
    parts = system("prompt_lookup", gamma=2)
    with pytest.raises(UserError, match=message):
        decode_all(*parts, [[1], [2]], **{"batch_size": 1, "max_new_tokens": 3} | keys)
