"""EAGLE's output law at batch 4, in float64 and by counting; greedy text on a real model."""

from __future__ import annotations

import functools

import cases
import eagle_cases as shared
import growth_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.testing import laws, loop
from specjax.testing.claims import widen
from specjax.testing.models import whole_text
from specjax.theory import statistics
from specjax.types import ModelParams

VOCAB, STEPS = 3, 4
# Label -> name, keys, rule.
LAWS = {
    "eagle dynamic": ("eagle", {"nodes": 5, "depth": 2, "top_k": 2}, "recursive"),
    "eagle3 dynamic": (
        "eagle3",
        {"nodes": 4, "depth": 2, "top_k": 2, "draft_ids": (0, 2)},
        "deterministic",
    ),
    "eagle tree": ("eagle", {"tree": "2x1", "siblings": "without_replacement"}, "traversal"),
    "eagle3 tree": (
        "eagle3",
        {"tree": "2x1", "siblings": "iid", "draft_ids": (1, 2), "norm_output": True},
        "k_seq",
    ),
    "eagle chain": (
        "eagle",
        {"gamma": 2, "siblings": "without_replacement", "control": "threshold:0.4"},
        "block",
    ),
    "eagle3 beam": ("eagle3", {"tree": "beam", "depth": 2, "top_k": 2}, "match"),
}


def marked(quick):
    return [
        pytest.param(label, marks=[] if label in quick else [pytest.mark.slow], id=label)
        for label in LAWS
    ]


@pytest.mark.parametrize("label", marked(()))
def test_exact_law(label):
    """Enumerated in float64."""
    name, keys, rule = LAWS[label]
    with jax.enable_x64(True):
        table = cases.table(0)
        target = testing.tabular(VOCAB)
        drafter = cases.random_heads(name, target, table, **keys)
        params = jax.tree.map(widen, ModelParams(table, drafter.init_params(None)))
        for settings in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
            assert (
                growth_cases.law_error(drafter, rule, target, params, **settings)
                < growth_cases.EXACT
            )


@pytest.mark.parametrize("label", marked(()))
def test_law_of_the_compiled_loop_at_batch_4(label, runs=5000):
    """Four ragged rows at temperature 1, many times, each against the law of its own text.

    The target reads its whole cache, and a row emits more tokens than one round can give.
    """
    name, keys, rule = LAWS[label]
    target, table = whole_text(testing.tabular(VOCAB)), cases.table(0)
    drafter = cases.random_heads(name, target, table, **keys)
    params = ModelParams(table, drafter.init_params(None))
    prompts = [[2, 1], [0], [1, 1, 0, 2], [0, 0, 1]]
    tokens = np.asarray(texts(target, drafter, rule, params, prompts, runs))
    for row, prompt in enumerate(prompts):
        new = tokens[:, row, len(prompt) : len(prompt) + STEPS]
        law = laws.sequence_law(target, table, prompt, STEPS)
        cells = np.ravel_multi_index(tuple(new.T), law.shape)
        counts = np.bincount(cells, minlength=law.size).reshape(law.shape)
        assert statistics.chi_square(counts, law)[2] > 1e-4, prompt
        assert loop.detectable(law, runs) < 0.08


def texts(target, drafter, rule, params, prompts, runs):
    """i32[runs,4,S]: the texts of the compiled loop."""
    packed, lengths = decode.pack_prompts(prompts)
    chosen, size = accept.load(rule), packed.shape[1] + STEPS

    @jax.jit
    def decoded(params, keys):
        def once(_, keys):
            state = decode.prefill(
                target,
                drafter,
                params,
                packed,
                lengths,
                keys,
                max_len=size,
                limit=lengths + STEPS,
                sampling=sampling.make_sampling(4),
            )
            state, _ = decode.generate(target, drafter, chosen, params, state, max_steps=STEPS)
            return None, jnp.where(state.failed[:, None] < 0, state.tokens[:, :size], -1)

        return jax.lax.scan(once, None, keys)[1]

    keys = rng.row_keys(0, 4 * runs)
    return decoded(params, keys.reshape(runs, 4))


@functools.cache
def prompts_of(size):
    random = np.random.default_rng(0)
    return [[1, *random.integers(260, 500, n).tolist()] for n in (0, 2, 5, size)]


@pytest.mark.slow
@pytest.mark.parametrize("train", [0, 100])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("eagle", {"nodes": 10, "depth": 4, "top_k": 3}),
        ("eagle3", {"gamma": 3, "draft_ids": tuple(range(256, 512))}),
        ("eagle3", {"tree": "3x2x1", "siblings": "without_replacement"}),
    ],
    ids=["eagle, dynamic", "eagle3, chain, draft vocabulary", "eagle3, tree"],
)
def test_greedy_is_plain_greedy_on_a_real_model(stories, name, keys, train):
    """Token by token, with random networks and with briefly trained ones."""
    target, table = stories.lm, stories.params
    if train:
        drafter = shared.trained(name, target, table, train, **keys)
    else:
        drafter = cases.random_heads(name, target, table, scale=0.1, **keys)
    params, prompts = ModelParams(table, drafter.init_params(None)), prompts_of(9)
    packed, lengths = decode.pack_prompts(prompts)

    def begin(drafter):
        return decode.prefill(
            target,
            drafter,
            params,
            packed,
            lengths,
            rng.row_keys(0, 4),
            max_len=64,
            sampling=sampling.make_sampling(4, 0.0),
        )

    plain = decode.autoregressive(
        target, params, begin(drafters.make("none", target)), max_steps=64
    )
    rule = accept.load("recursive")
    state, records = decode.generate(target, drafter, rule, params, begin(drafter), max_steps=64)
    decode.check(state)
    np.testing.assert_array_equal(state.tokens[:, :64], plain.tokens[:, :64])
    tau = records.emitted.sum() / (records.emitted > 0).sum()
    assert tau > (1.25 if train else 0.99)
