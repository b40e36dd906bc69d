"""Several draft models: the output law, caches, and paths over nodes of different models."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.errors import NonFiniteLogits, UserError
from specjax.models import hf
from specjax.types import INDEPENDENT, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "independent": ("specinfer", {"models": "@drafts", "tree": "chain:2"}, ("recursive",)),
}

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3, 3, 3]]
NEW = [20, 3, 20, 11]
TREE = "2x1x2"


@functools.cache
def pair():
    """(target, draft models, params): a noisy copy of the target, and a model of another family."""
    target, params = testing.tiny("llama", 0, 20.0)
    noise = np.random.default_rng(5)
    noisy = jax.tree.map(
        lambda x: x + 0.05 * np.std(x) * noise.normal(size=x.shape).astype(np.float32), params
    )
    unrelated, other = testing.tiny("gpt2", 1, 20.0, layers=1)
    return target, (target._replace(name="noisy"), unrelated), ModelParams(params, (noisy, other))


def begin(drafter, temperature):
    target, _, params = pair()
    packed, lengths = decode.pack_prompts(PROMPTS)
    return decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, len(PROMPTS)),
        max_len=packed.shape[1] + 20,
        limit=lengths + jnp.asarray(NEW),
        sampling=sampling.make_sampling(len(PROMPTS), temperature),
    )


@functools.partial(jax.jit, static_argnums=0)
def one_pass(model, params, tokens):
    cache = model.init_cache(*tokens.shape)
    _, block = model.apply(params, jnp.maximum(tokens, 0), cache)
    return model.commit(cache, block, jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32))


def assert_holds_the_text(model, params, cache, state) -> int:
    """The cache is that of one pass over the committed text.

    Returns how many tokens it lacks, the largest number of all rows that are not done.
    """
    length, held, done = (np.asarray(x) for x in (state.length, cache.length, state.done))
    # A finished row may hold its pending token too.
    assert (held <= length).all() and (held < length)[~done].all()
    assert (length - held <= 4)[~done].all()
    expected = one_pass(model, params, state.tokens)
    for ours, right in zip(*(jax.device_get(x.k + x.v) for x in (cache, expected)), strict=True):
        for row, kept in enumerate(held):
            np.testing.assert_allclose(
                ours[row, :, :kept], right[row, :, :kept], atol=1e-4, rtol=1e-3
            )
    return int((length - held)[~done].max(initial=0))


@pytest.mark.slow
def test_greedy_identity_and_the_draft_caches():
    """Three rounds at a time both caches hold the committed text.

    At temperature 0 the final text is that of plain decoding.
    """
    target, models, params = pair()
    drafter, most, accepted = drafters.make("specinfer", target, models=models, tree=TREE), 0, 0
    for temperature in (0.0, 1.0):
        state = begin(drafter, temperature)
        while not bool(state.done.all()):
            state, records = decode.generate(
                target, drafter, accept.load("recursive"), params, state, max_steps=3
            )
            accepted += int(records.accepted.sum())
            for model, own, part in zip(models, params.draft, state.draft.parts, strict=True):
                most = max(most, assert_holds_the_text(model, own, part.kept, state))
        decode.check(state)
        text = decode.outputs(state, [len(p) for p in PROMPTS])
        assert [len(row) for row in text] == NEW
        if not temperature:
            plain = decode.autoregressive(
                target, params, begin(drafters.make("none", target), 0.0), max_steps=20
            )
            assert text == decode.outputs(plain, [len(p) for p in PROMPTS])
    assert accepted > 20 and most > 2  # a model was fed more than the last leaf


NUMBERS = 8


def counting(seed, wrong):
    """A table that counts upwards (almost surely), except after the tokens ``wrong``.

    There the next token is random and depends on the last two tokens.
    """
    table = 60 * jax.nn.one_hot((jnp.arange(NUMBERS) + 1) % NUMBERS, NUMBERS)
    table = jnp.broadcast_to(table, (NUMBERS + 1, NUMBERS, NUMBERS))
    noise = 200 * testing.random_table(seed, NUMBERS)
    return jnp.where(jnp.isin(jnp.arange(NUMBERS), jnp.asarray(wrong))[:, None], noise, table)


def continuation(table, text, count):
    """The most probable next tokens of a table."""
    text = list(text)
    for _ in range(count):
        text.append(int(np.argmax(table[text[-2], text[-1]])))
    return text[-count:]


@functools.cache
def three():
    target = testing.tabular(NUMBERS)
    models = [testing.tabular(NUMBERS, f"draft {i}") for i in range(3)]
    return target, drafters.make("specinfer", target, models=models, tree="chain:3")


def start(params):
    return decode.prefill(
        *three(), params, jnp.asarray([[7, 0]]), jnp.asarray([2]), rng.row_keys(0, 1), max_len=40
    )


@pytest.mark.parametrize("rule", by_default(["recursive", "match", "deterministic"], ["recursive"]))
def test_a_path_over_several_models(rule):
    """The accepted path begins at one model's node and continues below another model's.

    Both nodes have the same token; a third model proposed no node of the path. The next draft of
    each model continues the whole committed text.
    """
    target, drafter = three()
    tables = [counting(1, [1]), counting(2, []), counting(3, list(range(8)))]
    params = ModelParams(counting(0, []), tuple(tables))
    text, lacking = [7, 0], []
    rounds = decode.stream(target, drafter, accept.load(rule), params, start(params))
    for state, info in itertools.islice(rounds, 6):
        drafts = np.asarray(info.draft.tokens).reshape(3, 3).tolist()
        assert drafts == [continuation(np.asarray(table), text, 3) for table in tables]
        assert info.draft.parents.tolist() == [[-1, 0, 1, -1, 3, 4, -1, 6, 7]]
        assert int(info.accepted[0]) == 3
        text += info.tokens[0].tolist()
        lacking.append([len(text) - int(part.kept.length[0]) for part in state.draft.parts])
        for cache in (part.kept for part in state.draft.parts):
            held = int(cache.length[0])
            assert cache.entries[0, :held].tolist() == text[:held]
    assert text == [7, *(i % 8 for i in range(len(text) - 1))]
    # Model 0 is right after 0 and wrong after 1. Model 1 is always right: its cache lacks its leaf,
    # also where all nodes of the path are model 0's.
    assert lacking[:2] == [[3, 2, 4], [2, 2, 4]]


def test_one_broken_model_is_reported():
    target, drafter = three()
    tables = [counting(i, []) for i in range(4)]
    params = ModelParams(tables[0], (tables[1], tables[2] * jnp.nan, tables[3]))
    with pytest.raises(NonFiniteLogits, match="row 0, round 0"):
        list(decode.stream(target, drafter, accept.load("recursive"), params, start(params)))


def test_one_model_is_its_own_tree():
    target, models, params = pair()
    alone = drafters.make("specinfer", target, models=models[:1], tree="chain:2")
    assert (alone.siblings, alone.nodes, alone.longest, alone.probs is None) == (
        "chain",
        2,
        2,
        False,
    )
    both = drafters.make("specinfer", target, models=models, tree="2x2")
    assert (both.siblings, both.nodes, both.longest, both.probs) == (INDEPENDENT, 12, 2, None)
    wide = drafters.make(
        "specinfer", target, models=models[:1], tree="2x2", params=params.draft[:1]
    )
    assert wide.siblings == "iid" and len(wide.init_params(jax.random.key(0))) == 1
    accept.check_pair(alone, accept.load("chain"))
    with pytest.raises(UserError, match="specinfer drafts independent; rules for it are"):
        accept.check_pair(both, accept.load("k_seq"))


V = 3


@pytest.mark.slow
@pytest.mark.fast
def test_exact_law():
    """Two different models in float64; with three tokens, equal siblings are frequent."""
    target = testing.tabular(V)
    models = [testing.tabular(V, "first"), testing.tabular(V, "second")]
    one = drafters.make("specinfer", target, models=models, tree="chain:1")
    with jax.enable_x64(True):
        tables = [testing.random_table(i, V) for i in range(3)]
        params = ModelParams(tables[0], tuple(tables[1:]))

        def error(drafter, rule, steps, rounds):
            law = testing.exact_law(
                target,
                drafter,
                accept.load(rule),
                params,
                [1, 2],
                steps,
                rounds=rounds,
                temperature=1.0,
            )
            assert abs(law.sum() - 1) < 1e-12
            truth = testing.sequence_law(target, tables[0], [1, 2], steps, temperature=1.0)
            return testing.total_variation(law, truth)

        # Every rule, and deeper trees: tests/testing/test_laws.py.
        assert error(one, "recursive", 2, None) < 1e-12


@pytest.mark.fast
def test_errors(tmp_path):
    target, models, params = pair()
    make = functools.partial(drafters.make, "specinfer", target)
    cases = [
        ({"models": []}, "models has an empty entry"),
        ({"models": ""}, "models has an empty entry"),
        ({"models": "a,,b"}, "models has an empty entry"),
        ({"models": models[0]}, "give a list of draft models"),
        ({"models": models, "params": [{}]}, "there are 2 models and 1 params"),
        ({"models": models, "tree": "4y2"}, "the tree is '4y2'"),
        ({"models": models, "tree": "33"}, "the tree has 33 siblings and the vocabulary 32"),
        (
            {"models": [models[0], testing.tiny("llama", vocab_size=40)[0]]},
            "vocabulary of 40 and the target of 32",
        ),
        ({"models": "/nowhere,/nothing"}, "/nowhere is no directory"),
    ]
    for keys, message in cases:
        with pytest.raises(UserError, match=message):
            make(**keys)
    with pytest.raises(UserError, match="specinfer was made from an LM without params"):
        make(models=models).init_params(jax.random.key(0))
    short = make(models=[models[0], models[1]._replace(max_positions=16)])
    with pytest.raises(UserError, match="the draft model has 16"):
        begin(short, 0.0)
    # Exactly as many positions as the text needs.
    assert begin(make(models=[models[0], models[1]._replace(max_positions=27)]), 0.0)
    for i in range(2):
        hf.save(tmp_path / str(i), testing.tiny_config(), params.target)
    loaded = make(models=f"{tmp_path}/0, {tmp_path}/1").init_params(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, loaded, (params.target, params.target))
