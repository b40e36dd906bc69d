"""The law of the compiled loop's text against the target's exact law, on many rows.

Each run decodes ROWS rows from one prompt and compares the counts of the first three tokens with
their exact law. Three tokens, so that the noise, the caches and the positions of the second round
matter. Power: with 120 000 rows and 63 degrees of freedom a total variation of 0.015 is missed at
the 0.001 level with probability below 0.01 (test_power).

The other pairs of drafter and rule are in test_conformance.py, on fewer rows; test_laws.py
enumerates the laws of the rules.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import mutants
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.drafters.draft_models import draft_model, draft_tree
from specjax.testing import loop
from specjax.types import ModelParams

ROWS, V, STEPS = 120_000, 4, 3
LEVEL = 1e-3
PROMPT = [2, 1, 3, 2, 1]
TARGET, DRAFT = testing.tabular(V), testing.tabular(V, "draft")
TABLES = ModelParams(testing.random_table(0, V), testing.random_table(1, V))
SETTINGS = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 3},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1},
}


@functools.cache
def target_law(setting):
    return testing.sequence_law(TARGET, TABLES.target, PROMPT, STEPS, **SETTINGS[setting])


@functools.cache
def drafter_of(shape):
    if shape == "tree":
        return draft_tree.make(TARGET, model=DRAFT, tree="2x1", siblings="without_replacement")
    return drafters.make("draft_model", TARGET, model=DRAFT, gamma=2)


def p_value(drafter, rule, setting):
    fit = loop.loop_fit(
        TARGET, drafter, accept.load(rule), TABLES, PROMPT, STEPS, ROWS, **SETTINGS[setting]
    )
    return fit.p_value


def three_token_cases():
    """None by default: test_dropping_by_row_and_round_keeps_the_law counts through the loop."""
    for shape, rule in (("chain", "chain"), ("tree", "recursive")):
        for setting in SETTINGS:
            yield pytest.param(shape, rule, setting, marks=pytest.mark.slow)


@pytest.mark.parametrize(("shape", "rule", "setting"), list(three_token_cases()))
def test_three_token_law(shape, rule, setting):
    assert p_value(drafter_of(shape), rule, setting) > LEVEL


@pytest.mark.parametrize("setting", by_default(["temperature", "top_k"], ["top_k"]))
def test_autoregressive_law(setting):
    packed, lengths = (jnp.repeat(x, ROWS, 0) for x in decode.pack_prompts([PROMPT]))
    keys, none = rng.row_keys(1, ROWS), drafters.make("none", TARGET)
    state = decode.prefill(
        TARGET,
        none,
        TABLES,
        packed,
        lengths,
        keys,
        max_len=len(PROMPT) + STEPS,
        sampling=sampling.make_sampling(ROWS, **SETTINGS[setting]),
    )
    state = decode.autoregressive(TARGET, TABLES, state, max_steps=STEPS)
    tokens = np.asarray(state.tokens[:, len(PROMPT) : len(PROMPT) + STEPS])
    counts = np.bincount(np.ravel_multi_index(tokens.T, (V,) * STEPS), minlength=V**STEPS)
    assert testing.chi_square(counts, target_law(setting))[2] > LEVEL


@pytest.mark.parametrize(
    ("shape", "family"),
    [
        pytest.param("chain", "gpt2", marks=pytest.mark.slow),
        pytest.param("tree", "llama", marks=pytest.mark.slow),
        pytest.param("chain", "llama", marks=pytest.mark.slow),
        pytest.param("tree", "gpt2", marks=pytest.mark.slow),
    ],
)
def test_two_token_law_of_transformers(family, shape):
    """Real attention and caches: a target and a draft model of two families."""
    other = "gpt2" if family == "llama" else "llama"
    target, params = testing.tiny(family, 0, vocab_size=6, width=16)
    draft, draft_params = testing.tiny(other, 1, vocab_size=6, width=16, layers=1)
    if shape == "chain":
        drafter, rule = draft_model.make(target, model=draft, gamma=2), "chain"
    else:
        drafter, rule = (
            draft_tree.make(target, model=draft, tree="3x1", siblings="iid"),
            "recursive",
        )
    fit = testing.loop_fit(
        target,
        drafter,
        accept.load(rule),
        ModelParams(params, draft_params),
        [1, 5, 2],
        steps=2,
        rows=50_000,
        temperature=1.5,
        top_p=0.95,
    )
    assert fit.p_value > LEVEL and fit.detectable < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("argmax_with_softmax_probs", "match"),
        ("declares_other_probs", "match"),
        ("drops_after_drawing", "deterministic"),
    ],
)
def test_rules_that_take_any_draft(name, rule):
    """As in test_laws.py, through the compiled loop."""
    drafter = mutants.named(name).change(drafter_of("chain"))
    assert p_value(drafter, rule, "temperature") > LEVEL


@pytest.mark.slow
def test_dropping_by_row_and_round_keeps_the_law():
    """Nodes may be invalid by a rule that does not depend on a drawn token."""

    def every_second_row(draft, keys, context):
        odd = (jnp.arange(draft.tokens.shape[0]) % 2 == 1)[:, None]
        late = (keys.round > 0) | (jnp.arange(draft.tokens.shape[1]) > 0)
        return draft.replace(valid=~(odd & late))

    drafter = mutants.with_draft(every_second_row)(drafter_of("chain"))
    assert p_value(drafter, "chain", "temperature") > LEVEL


@pytest.mark.fast
def test_power():
    """The hardest deviation of total variation 0.015 is detected with probability above 0.99."""
    assert testing.detectable(target_law("temperature"), ROWS) < 0.015


@pytest.mark.fast
def test_power_holds_for_deviations_of_any_form():
    """A deviation of the stated total variation is detected 99 times in 100."""
    law = np.random.default_rng(0).dirichlet(np.ones(40))
    size, rows, random = testing.detectable(law, 20_000), 20_000, np.random.default_rng(1)
    even = np.where(random.permutation(40) % 2, 1.0, -1.0) * law
    even -= law * even.sum()
    spike = np.zeros(40)
    spike[3], spike[7] = 1.0, -1.0
    for shift in (even, spike * min(law[7], 1)):
        changed = law + shift * size / (0.5 * np.abs(shift).sum())
        if (changed < 0).any():
            continue
        changed /= changed.sum()
        detected = [
            testing.chi_square(random.multinomial(rows, changed), law)[2] < 1e-3 for _ in range(300)
        ]
        assert np.mean(detected) > 0.97
    alarms = [testing.chi_square(random.multinomial(rows, law), law)[2] < 1e-3 for _ in range(300)]
    assert np.mean(alarms) < 0.02
