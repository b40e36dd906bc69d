"""Shared by the tests of the decode loop: small models, drafters, prefill, and both loops.

Compiling takes most of the time. All functions use the same static arguments and shapes where a
test does not need others, so that tests share compiled programs.
"""

from __future__ import annotations

import functools

import jax
import numpy as np

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.drafters.draft_models import draft_model
from specjax.types import DecodeState, ModelParams

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3, 3, 3], [1, 2, 1, 2, 1]]
NEW = 40

# One model per size, one program per model.
tabular = functools.cache(testing.tabular)


@functools.cache
def tiny(family):
    """A random decoder of two layers: (LM, params)."""
    return testing.tiny(family, 0)


@functools.cache
def drafters_of(model):
    """name -> (drafter, draft params; None: the target's).

    "stranger" is an unrelated model, "itself" is the target itself (always accepted).
    """
    stranger = testing.tiny("gpt2", 7, layers=1, vocab_size=model.vocab_size)
    original = {"gamma": 3, "match": "latest", "partial": False}
    return {
        "stranger": (draft_model.make(model, model=stranger[0], gamma=3), stranger[1]),
        "itself": (draft_model.make(model, model=model, gamma=4), None),
        "itself, gamma 1": (draft_model.make(model, model=model, gamma=1), None),
        "lookup": (drafters.make("prompt_lookup", model, gamma=5), {}),
        "lookup, original rule": (drafters.make("prompt_lookup", model, **original), {}),
    }


def pair(model, params, name):
    """(drafter, parameters of both)."""
    drafter, draft_params = drafters_of(model)[name]
    return drafter, ModelParams(params, params if draft_params is None else draft_params)


def begin(
    model,
    drafter,
    params,
    prompts=PROMPTS,
    *,
    new=NEW,
    seed=0,
    ids=None,
    width=None,
    max_len=None,
    chunk=256,
    **settings,
):
    """The state after the prefill; at temperature 0 if no sampling settings are given."""
    packed, lengths = decode.pack_prompts(prompts, width)
    settings = settings or {"temperature": 0.0}
    return decode.prefill(
        model,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(seed, ids or len(prompts)),
        max_len=max_len or packed.shape[1] + NEW,
        limit=lengths + new,
        sampling=sampling.make_sampling(len(prompts), **settings),
        chunk=chunk,
    )


def stops(eos_id):
    """Always two ids, so that tests with and without ``eos_id`` share programs; -2 never occurs."""
    ids = (eos_id,) if isinstance(eos_id, int) else eos_id or ()
    return (*ids, -2, -2)[:2]


def texts(state, prompts):
    """The new tokens of each row."""
    return decode.outputs(state, [len(p) for p in prompts])


def oracle(model, params, prompts=PROMPTS, *, eos_id=None, **keys):
    """The new tokens of each row, by plain decoding."""
    state = begin(model, drafters.make("none", model), params, prompts, **keys)
    state = decode.autoregressive(model, params, state, max_steps=NEW, eos_id=stops(eos_id))
    return texts(state, prompts)


def run(model, drafter, rule, params, state, *, eos_id=None):
    """(final state, records) of the compiled loop, at most NEW rounds."""
    rule = accept.load(rule)
    return decode.generate(model, drafter, rule, params, state, max_steps=NEW, eos_id=stops(eos_id))


def speculate(model, drafter, rule, params, prompts=PROMPTS, *, eos_id=None, **keys):
    """(new tokens of each row, final state, records). All rows must end without an error."""
    state = begin(model, drafter, params, prompts, **keys)
    state, records = run(model, drafter, rule, params, state, eos_id=eos_id)
    decode.check(state)
    assert bool(state.done.all())
    return texts(state, prompts), state, records


def made_up_state(rows, seed):
    """A ``DecodeState`` with other numbers in every array and row: for code that moves rows."""
    draw = np.random.default_rng(seed)
    numbers = lambda *shape: draw.integers(1, 100, (rows, *shape)).astype(np.int32)  # noqa: E731
    settings = sampling.make_sampling(rows, draw.random(rows), presence_penalty=0.5)
    return DecodeState(
        *(numbers(6), numbers(), numbers() + 100, numbers() > 50, numbers()),
        cache={"k": numbers(2, 3)},
        draft={"tree": numbers(4)},
        keys=rng.row_keys(seed, rows),
        round=numbers(),
        sampling=settings.replace(maps=settings.maps.replace(prompt=numbers())),
        taps=(numbers(2),),
    )


def arrays_of(state):
    """name -> array, with the data of keys."""
    leaves = jax.tree_util.tree_leaves_with_path(
        state.replace(keys=jax.random.key_data(state.keys))
    )
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
