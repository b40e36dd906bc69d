"""TriForce: three levels that are exact when sampled, and the mistake of the published code."""

from __future__ import annotations

import functools
import types

import cases
import jax
import jax.numpy as jnp
import mutants
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.drafters.nested import triforce
from specjax.errors import UserError
from specjax.types import ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "triforce": (
        "triforce",
        {
            "model": "@draft",
            "gamma": 2,
            "budget": 2,
            "chunk": 2,
            "refresh": 2,
            "model_budget": 2,
            "sinks": 1,
        },
        ("chain",),
    ),
}

PROMPTS = [[1, 2, 3, 0, 4, 2, 2, 1], [4], [3, 1, 2, 0, 4], [2, 2]]
NEW = [20, 17, 20, 9]
SMALL = {"budget": 2, "chunk": 2, "refresh": 2, "model_budget": 2, "sinks": 1}


def enumerated(vocab, seed=0, **keys):
    """The exact law of the tokens of one outer round and what follows it."""
    target, model = testing.keyed(vocab), testing.keyed(vocab, "draft")
    drafter = drafters.make("triforce", target, model=model, **SMALL, **keys)
    with jax.enable_x64():
        params = ModelParams(cases.table(seed, vocab), cases.table(seed + 1, vocab))
        # Long enough that both views leave out tokens.
        prompt = [0, 1, 1, 0, 1, 0, 0, 1, 1]
        return testing.enumerated(
            target, drafter, accept.load("chain"), params, prompt, 3, rounds=1
        )


@pytest.mark.parametrize(
    ("vocab", "keys"),
    [
        (2, {"gamma": 2, "model_gamma": 1}),
        pytest.param(2, {"gamma": 2, "model_gamma": 2}, marks=pytest.mark.slow),
        pytest.param(3, {"gamma": 2, "model_gamma": 1}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_three_levels_have_the_law_of_the_target(vocab, keys):
    result = enumerated(vocab, **keys)
    assert np.abs(result.law - result.truth).sum() < 1e-12
    assert (result.accepted > 0.01).all()


@pytest.mark.slow
def test_the_published_mistake_is_detected(monkeypatch):
    """A rejected token of the small model is replaced by a draw from the middle level's probs."""
    wrong = mutants.named("resample_from_target").rule()
    patched = types.SimpleNamespace(load=lambda name: wrong)
    monkeypatch.setattr(triforce, "accept", patched)
    triforce_make = functools.partial(triforce.make, testing.keyed(2))
    model = testing.keyed(2, "draft")
    drafter = triforce_make(model=model, gamma=2, model_gamma=1, **SMALL)
    with jax.enable_x64():
        params = ModelParams(cases.table(0, 2), cases.table(1, 2))
        result = testing.enumerated(
            testing.keyed(2),
            drafter,
            accept.load("chain"),
            params,
            [0, 1, 1, 0, 1, 0, 0, 1, 1],
            3,
            rounds=1,
        )
    assert np.abs(result.law - result.truth).sum() > 1e-3


@functools.cache
def models():
    target, params = testing.tiny("llama", 0, 20.0)
    model, own = testing.tiny("llama", 1, 20.0, layers=1)
    return target, model, ModelParams(params, own)


def decoded(drafter, params, temperatures):
    target = models()[0]
    packed, lengths = decode.pack_prompts(PROMPTS)
    state = decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, 4),
        max_len=32,
        limit=lengths + jnp.asarray(NEW),
        sampling=sampling.make_sampling(4, temperatures),
    )
    state, records = decode.generate(
        target, drafter, accept.load("chain"), params, state, max_steps=24
    )
    decode.check(state)
    assert bool(state.done.all())
    return decode.outputs(state, np.asarray(lengths)), records


def plain():
    target, _, params = models()
    none = drafters.make("none", target)
    packed, lengths = decode.pack_prompts(PROMPTS)
    how = sampling.make_sampling(4, 0.0)
    keys = {"max_len": 32, "limit": lengths + jnp.asarray(NEW), "sampling": how}
    state = decode.prefill(target, none, params, packed, lengths, rng.row_keys(0, 4), **keys)
    state = decode.autoregressive(target, params, state, max_steps=24)
    return decode.outputs(state, np.asarray(lengths))


@pytest.mark.slow
def test_a_middle_level_with_the_whole_text_has_every_token_accepted():
    """In greedy and sampled rows, whatever the small model drafts."""
    target, model, params = models()
    keys = {"budget": 40, "model_budget": 6, "sinks": 2, "gamma": 3}
    drafter = drafters.make("triforce", target, model=model, params=params.draft, **keys)
    texts, records = decoded(drafter, params, [0.0, 1.0, 0.7, 1.0])
    active = np.asarray(records.verified) > 0
    assert (np.asarray(records.accepted)[active] == 3).all()
    assert texts[0] == plain()[0]


@pytest.mark.parametrize("model_gamma", by_default([1, 3], ()))
def test_small_views_decode_the_greedy_text(model_gamma):
    target, model, params = models()
    keys = {**SMALL, "gamma": 4, "model_gamma": model_gamma}
    drafter = drafters.make("triforce", target, model=model, params=params.draft, **keys)
    texts, records = decoded(drafter, params, 0.0)
    assert texts == plain()
    accepted, tested = np.asarray(records.accepted).sum(), np.asarray(records.tested).sum()
    assert 0 < accepted < tested


@pytest.mark.fast
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        ({"model_gamma": 0}, "model_gamma is 0; it must be a whole number >= 1"),
        ({"budget": 4}, "budget is 4; it must be a multiple of chunk, which is 8"),
        ({"model_budget": 16}, "is 16 and its sinks are 16: .* give a budget of at least 17"),
        ({"model": testing.tiny(vocab_size=7)[0]}, "the draft model has a vocabulary of 7"),
        ({"model": testing.tabular(32)}, "tabular has none; take a decoder of specjax.models"),
    ],
)
def test_bad_keys(keys, message):
    target, model, _ = models()
    with pytest.raises(UserError, match=message):
        drafters.make("triforce", target, **{"model": model, **keys})


@pytest.mark.fast
def test_models_without_params_or_positions_are_refused():
    target, model, params = models()
    made = drafters.make("triforce", target, model=model)
    with pytest.raises(UserError, match="triforce was made from an LM without params"):
        made.init_params(None)
    short = drafters.make("triforce", target, model=model._replace(max_positions=16))
    with pytest.raises(UserError, match="need 32 positions, and the draft model has 16"):
        decoded(short, params, 0.0)
