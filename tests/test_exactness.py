"""The law of the whole compiled loop against the enumerated law of the target, and the mutants that must fail.

Each run decodes ROWS rows from one prompt and compares the counts of the first three tokens with their exact law. Three
tokens, because then the second round's noise, caches and positions matter. Power: with 120 000 rows and 63 degrees of
freedom a total variation of 0.015 is missed at the 0.001 level with probability below 0.01 (test_power).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.accept import _chain, chain
from specjax.drafters import draft_model
from specjax.types import Accept, Draft, ModelParams

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


def counts(drafter, rule, settings, target=TARGET, params=TABLES, prompt=PROMPT, rows=ROWS, steps=STEPS, seed=0):
    packed, lengths = decode.pack_prompts([prompt])
    packed, lengths = jnp.repeat(packed, rows, 0), jnp.repeat(lengths, rows, 0)
    state = decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(seed, rows),
        max_len=len(prompt) + steps,
        sampling=sampling.make_sampling(rows, **settings),
    )
    state, _ = decode.generate(target, drafter, rule, params, state, max_steps=steps)
    decode.check(state)
    tokens = np.asarray(state.tokens[:, len(prompt) : len(prompt) + steps])
    shape = (target.vocab_size,) * steps
    return np.bincount(np.ravel_multi_index(tokens.T, shape), minlength=np.prod(shape)).reshape(shape)


def p_value(seen, law):
    return testing.chi_square(seen, law)[2]


@functools.cache
def drafter(name):
    keys = {"draft_model": {"model": DRAFT, "gamma": 2}, "prompt_lookup": {"gamma": 2, "max_ngram": 2}}
    return drafters.make(name, TARGET, **keys.get(name, {}))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rule", accept.names())
@pytest.mark.parametrize("name", drafters.names())
def test_three_token_law(name, rule, settings):
    assert p_value(counts(drafter(name), accept.load(rule), settings), truth(**settings)) > LEVEL


def test_autoregressive_has_the_law():
    for settings in SETTINGS[:2]:
        packed, lengths = (jnp.repeat(x, ROWS, 0) for x in decode.pack_prompts([PROMPT]))
        knobs = sampling.make_sampling(ROWS, **settings)
        keys = rng.row_keys(1, ROWS)
        state = decode.prefill(
            TARGET, drafter("none"), TABLES, packed, lengths, keys, max_len=len(PROMPT) + STEPS, sampling=knobs
        )
        state = decode.autoregressive(TARGET, TABLES, state, max_steps=STEPS)
        tokens = np.asarray(state.tokens[:, len(PROMPT) : len(PROMPT) + STEPS])
        seen = np.bincount(np.ravel_multi_index(tokens.T, (V,) * STEPS), minlength=V**STEPS)
        assert p_value(seen, truth(**settings)) > LEVEL


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_two_token_law_of_transformers(family):
    """Real attention, real caches: target and draft of two families, the law by enumeration over all prefixes."""
    target, params = testing.tiny(family, 0, vocab_size=6)
    other, other_params = testing.tiny("gpt2" if family == "llama" else "llama", 1, vocab_size=6, layers=1)
    made = draft_model.make(target, model=other, gamma=2)
    prompt, settings = [1, 5, 2], {"temperature": 1.5, "top_p": 0.95}
    law = testing.sequence_law(target, params, prompt, 2, **settings)
    pair = ModelParams(params, other_params)
    seen = counts(made, accept.load("chain"), settings, target, pair, prompt, rows=100_000, steps=2)
    assert p_value(seen, law) > LEVEL


def test_power():
    """A total variation of 0.015, spread over half the cells, is found with probability above 0.99."""
    law = truth(temperature=1.0)
    shift = np.where(np.arange(V**STEPS) % 2, 1.0, -1.0) * law.ravel()
    shift -= law.ravel() * shift.sum()
    shift *= 0.015 / (0.5 * np.abs(shift).sum())
    noncentrality = ROWS * (shift**2 / law.ravel()).sum()
    freedom = V**STEPS - 1
    critical = scipy.stats.chi2.isf(LEVEL, freedom)
    assert scipy.stats.ncx2.sf(critical, freedom, noncentrality) > 0.99


# Mutants: each is a mistake found in published code. The same test must reject every one of them.


def resample_from_target(keys, draft, target_probs):
    """Draws from the target, not from the residual, after a rejection."""
    target_mass, draft_mass = chain.coins(draft, target_probs)
    u = jax.vmap(lambda k: jax.random.uniform(k, target_mass.shape[1:]))(keys.at_round(rng.ACCEPT))
    accepted, _ = chain.resolve(u * draft_mass < target_mass, draft, target_probs)
    law = jnp.take_along_axis(target_probs, accepted[:, None, None], 1)[:, 0]
    return _chain.verdict(draft, accepted, sampling.draw_rows(keys.at_round(rng.RESIDUAL), law))


def match_then_resample(keys, draft, target_probs):
    """Compares with a draw of the target, then draws another one to emit."""
    chosen = sampling.draw_rows(keys.at_position(jnp.arange(target_probs.shape[1])), target_probs)
    accepted = _chain.first_failure(_chain.nodes(draft) & (draft.tokens == chosen[:, :-1]))
    law = jnp.take_along_axis(target_probs, accepted[:, None, None], 1)[:, 0]
    return _chain.verdict(draft, accepted, sampling.draw_rows(keys.at_round(rng.RESIDUAL), law))


def same_noise_every_round(keys, draft, target_probs):
    """Forgets to fold the round into the key."""
    return chain.chain(keys.replace(round=jnp.zeros((), jnp.int32)), draft, target_probs)


def same_noise_for_coin_and_residual(keys, draft, target_probs):
    """Uses one uniform number twice: to reject, and to choose what replaces the rejected token."""
    target_mass, draft_mass = chain.coins(draft, target_probs)
    u = jax.vmap(lambda k: jax.random.uniform(k, target_mass.shape[1:]))(keys.at_round(rng.ACCEPT))
    accepted, law = chain.resolve(u * draft_mass < target_mass, draft, target_probs)
    at = jnp.minimum(accepted, draft.tokens.shape[1] - 1)[:, None]
    reused = jnp.take_along_axis(u, at, 1)
    total = jnp.cumsum(law, -1)
    return _chain.verdict(draft, accepted, jnp.argmax(total > reused * total[:, -1:], -1))


@pytest.mark.parametrize(
    "mutant", [resample_from_target, match_then_resample, same_noise_every_round, same_noise_for_coin_and_residual]
)
def test_mutant_rules_die(mutant):
    rule = Accept(mutant, _chain.match, mutant.__name__, "L3")
    gamma = 1 if mutant is same_noise_every_round else 2  # short rounds: more of them in three tokens
    made = draft_model.make(TARGET, model=DRAFT, gamma=gamma)
    assert p_value(counts(made, rule, SETTINGS[0]), truth(**SETTINGS[0])) < 1e-6


def mutant_drafter(change):
    good = drafter("draft_model")

    def propose(params, keys, context, state):
        draft, state = good.propose(params, keys, context, state)
        return change(draft, keys, context), state

    return good._replace(propose=propose)


def argmax_draft(draft, keys, context):
    """Proposes the argmax and claims the softmax (keras-hub, toyllm)."""
    return draft.replace(tokens=jnp.argmax(draft.probs, -1).astype(jnp.int32))


def claimed_law(draft, keys, context):
    """Claims another law than the token was drawn from: without the temperature (transformers #47932)."""
    return draft.replace(probs=jnp.sqrt(draft.probs) / jnp.sqrt(draft.probs).sum(-1, keepdims=True))


def drop_after_look(draft, keys, context):
    """Withdraws a drawn token that it does not like (card D4)."""
    mass = jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]
    return draft.replace(valid=mass > 0.2)


def coin_noise(draft, keys, context):
    """Draws the draft token with the very number that the rule will accept it with."""
    u = jax.vmap(lambda k: jax.random.uniform(k, draft.tokens.shape[1:]))(keys.at_round(rng.ACCEPT))
    total = jnp.cumsum(draft.probs, -1)
    first = jnp.argmax(total > u[..., None] * total[..., -1:], -1).astype(jnp.int32)
    return draft.replace(tokens=jnp.concatenate([first[:, :1], draft.tokens[:, 1:]], 1))


@pytest.mark.parametrize("change", [argmax_draft, claimed_law, drop_after_look, coin_noise])
def test_mutant_drafters_die(change):
    made = mutant_drafter(change)
    assert p_value(counts(made, accept.load("chain"), SETTINGS[0]), truth(**SETTINGS[0])) < 1e-6


def test_match_takes_any_draft():
    """Sample-then-match compares ids only: it stays exact with the drafters that break the chain rule."""
    for change in (argmax_draft, claimed_law, drop_after_look):
        made = mutant_drafter(change)
        assert p_value(counts(made, accept.load("match"), SETTINGS[0]), truth(**SETTINGS[0])) > LEVEL


def test_dropping_a_deterministic_draft_is_safe():
    """valid=False anywhere keeps the law when the drop does not depend on a drawn value."""

    def every_second_row(draft, keys, context):
        odd = (jnp.arange(draft.tokens.shape[0]) % 2 == 1)[:, None]
        late = (keys.round > 0) | (jnp.arange(draft.tokens.shape[1]) > 0)
        return draft.replace(valid=~(odd & late))

    made = mutant_drafter(every_second_row)
    assert p_value(counts(made, accept.load("chain"), SETTINGS[0]), truth(**SETTINGS[0])) > LEVEL


def test_no_draft_is_ever_padded_with_a_token():
    """What stands in an invalid node is never looked at."""

    def nothing(draft, keys, context):
        return Draft(draft.tokens * 0 - 7, jnp.zeros_like(draft.valid), probs=draft.probs * jnp.nan)

    made = mutant_drafter(nothing)
    assert p_value(counts(made, accept.load("chain"), SETTINGS[0]), truth(**SETTINGS[0])) > LEVEL
