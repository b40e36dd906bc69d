"""The law of the whole compiled loop against the enumerated law of the target, on many rows and real attention.

Each run decodes ROWS rows from one prompt and compares the counts of the first three tokens with their exact law. Three
tokens, because then the second round's noise, caches and positions matter. Power: with 120 000 rows and 63 degrees of
freedom a total variation of 0.015 is missed at the 0.001 level with probability below 0.01 (test_power). Every other pair of
drafter and rule goes through tests/test_conformance.py, on fewer rows; the rules' laws are enumerated in tests/test_laws.py.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.drafters.draft_models import draft_model, draft_tree
from specjax.testing import loop, mutants
from specjax.types import Draft, ModelParams

ROWS, V, STEPS = 120_000, 4, 3
LEVEL = 1e-3
PROMPT = [2, 1, 3, 2, 1]
TARGET, DRAFT = testing.tabular(V), testing.tabular(V, "draft")
TABLES = ModelParams(testing.random_table(0, V), testing.random_table(1, V))
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1},
]


@functools.cache
def truth(**settings):
    return testing.sequence_law(TARGET, TABLES.target, PROMPT, STEPS, **settings)


def p_value(
    drafter, rule, settings, target=TARGET, params=TABLES, prompt=PROMPT, rows=ROWS, steps=STEPS
):
    seen = loop.counts(target, drafter, accept.load(rule), params, prompt, steps, rows, **settings)
    law = (
        truth(**settings)
        if target is TARGET
        else testing.sequence_law(target, params.target, prompt, steps, **settings)
    )
    return testing.chi_square(seen, law)[2]


@functools.cache
def drafter(name):
    if name == "tree":
        return draft_tree.make(TARGET, model=DRAFT, tree="2x1", siblings="without_replacement")
    return drafters.make("draft_model", TARGET, model=DRAFT, gamma=2)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("name", "rule"), [("chain", "chain"), ("tree", "recursive")])
def test_three_token_law(name, rule, settings):
    assert p_value(drafter(name), rule, settings) > LEVEL


def test_autoregressive_has_the_law():
    for settings in SETTINGS[:2]:
        packed, lengths = (jnp.repeat(x, ROWS, 0) for x in decode.pack_prompts([PROMPT]))
        knobs = sampling.make_sampling(ROWS, **settings)
        keys, none = rng.row_keys(1, ROWS), drafters.make("none", TARGET)
        state = decode.prefill(
            TARGET, none, TABLES, packed, lengths, keys, max_len=len(PROMPT) + STEPS, sampling=knobs
        )
        state = decode.autoregressive(TARGET, TABLES, state, max_steps=STEPS)
        tokens = np.asarray(state.tokens[:, len(PROMPT) : len(PROMPT) + STEPS])
        seen = np.bincount(np.ravel_multi_index(tokens.T, (V,) * STEPS), minlength=V**STEPS)
        assert testing.chi_square(seen, truth(**settings))[2] > LEVEL


@pytest.mark.parametrize(
    ("shape", "family"),
    [
        ("tree", "llama"),
        ("chain", "gpt2"),
        pytest.param("chain", "llama", marks=pytest.mark.slow),
        pytest.param("tree", "gpt2", marks=pytest.mark.slow),
    ],
)
def test_two_token_law_of_transformers(family, shape):
    """Real attention, real caches: target and draft of two families, the law by enumeration over all prefixes."""
    target, params = testing.tiny(family, 0, vocab_size=6)
    other, other_params = testing.tiny(
        "gpt2" if family == "llama" else "llama", 1, vocab_size=6, layers=1
    )
    if shape == "chain":
        made, rule = draft_model.make(target, model=other, gamma=2), "chain"
    else:
        made, rule = draft_tree.make(target, model=other, tree="3x1", siblings="iid"), "recursive"
    settings = {"temperature": 1.5, "top_p": 0.95}
    both = ModelParams(params, other_params)
    assert p_value(made, rule, settings, target, both, [1, 5, 2], rows=50_000, steps=2) > LEVEL


def test_power():
    """The hardest deviation of total variation 0.015 is found with probability above 0.99."""
    assert testing.detectable(truth(temperature=1.0), ROWS) < 0.015


def changed(change):
    return mutants._changed(change)(drafter("chain"))


@pytest.mark.parametrize(
    "name", ["argmax_claims_softmax", "claims_another_law", "drops_what_it_saw"]
)
def test_rules_that_take_any_draft(name):
    """Sample-then-match and deterministic candidates stay exact with drafters that break the other rules."""
    sick = {m.name: m for m in mutants.MUTANTS}[name].change(drafter("chain"))
    rule = "deterministic" if name == "drops_what_it_saw" else "match"
    assert p_value(sick, rule, SETTINGS[0]) > LEVEL


def test_dropping_without_looking_is_safe():
    """valid=False anywhere keeps the law when the drop does not depend on a drawn value."""

    def every_second_row(draft, keys, context):
        odd = (jnp.arange(draft.tokens.shape[0]) % 2 == 1)[:, None]
        late = (keys.round > 0) | (jnp.arange(draft.tokens.shape[1]) > 0)
        return draft.replace(valid=~(odd & late))

    assert p_value(changed(every_second_row), "chain", SETTINGS[0]) > LEVEL


@pytest.mark.parametrize("rule", ["chain", "block", "k_seq", "recursive", "traversal"])
def test_no_draft_is_ever_padded_with_a_token(rule):
    """What stands in an invalid node is never looked at: not its token, not its law."""

    def nothing(draft, keys, context):
        return Draft(draft.tokens * 0 - 7, jnp.zeros_like(draft.valid), probs=draft.probs * jnp.nan)

    assert p_value(changed(nothing), rule, SETTINGS[0], rows=30_000) > LEVEL
