"""Cascades: exact at every level, caches that follow the text, and lengths that are refused."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import nested_inner_rounds as _inner_rounds
from internals import nested_lengths as _lengths
from internals import nested_system as _system
from marks import by_default
from mutants import rules

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.accept import lenient
from specjax.drafters.nested import cascade
from specjax.errors import UserError
from specjax.testing import exact, law_checks, loop
from specjax.testing.exact import NoiseReused
from specjax.types import Accept, ModelParams

# Enumeration runs each operation alone: on one worker each is compiled once for all these files.
pytestmark = pytest.mark.xdist_group("enumeration")

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "cascade": (
        "cascade",
        {"models": "@drafts", "params": "@drafts params", "lengths": "2,0,0;1,0;1"},
        ("chain",),
    ),
    "cascade in parts": (
        "cascade",
        {"models": "@drafts", "params": "@drafts params", "lengths": "1,1,1;0,1;1"},
        (),
    ),
}
V = 2
CHAIN = accept.load("chain")
# Three levels, three levels with parts, a part of every kind.
SHAPES = ("2,0,0;1,0;1", "1,0,0;2,0;0", "1,1,0;1,1;1", "1,1,1;0,0;1")


def made(lengths, vocab=V, **keys):
    """The target, a cascade of two tables with these lengths, and the parameters."""
    target, *models = cases.models(vocab)
    tables = [cases.table(1, vocab), cases.table(2, vocab)]
    drafter = drafters.make(
        "cascade", target, models=models, params=tables, lengths=lengths, **keys
    )
    return target, drafter, ModelParams(cases.table(0, vocab), drafter.init_params(None))


@pytest.mark.parametrize("temperature", by_default((1.0, 0.6), (1.0,)))
@pytest.mark.parametrize("lengths", by_default(SHAPES, SHAPES[1:2]))
def test_the_law_of_three_levels_is_the_targets(lengths, temperature):
    target, drafter, params = made(lengths)
    finding = law_checks.check_law(
        target, drafter, CHAIN, params, [[1, 0, 1, 0, 1]], count=False, temperature=temperature
    )
    assert finding.passed, finding


def constant(probs):
    """A table that gives the same probabilities after every text."""
    return jnp.broadcast_to(jnp.log(jnp.asarray(probs)), (4, 3, 3))


TARGET, MIDDLE, SMALL = (0.4, 0.4, 0.2), (0.5, 0.3, 0.2), (0.2, 0.7, 0.1)


@functools.cache
def first_token():
    """The law of the first token for one draft token at each of two levels."""
    target, *models = cases.models(3)
    with jax.enable_x64(True):
        tables = [constant(MIDDLE), constant(SMALL)]
        drafter = drafters.make(
            "cascade", target, models=models, params=tables, lengths="1,0,0;1,0;0"
        )
        params = ModelParams(constant(TARGET), drafter.init_params(None))
        return exact.histories(target, drafter, CHAIN, params, [0]).first_token(3)


@pytest.mark.slow
def test_a_draw_without_the_residual_gives_the_known_wrong_law(monkeypatch):
    np.testing.assert_allclose(first_token(), TARGET, atol=1e-12)
    # The mistake of TriForce's code: outer law (.32, .50, .18).
    wrong = Accept(rules.resample_from_target, CHAIN.greedy, "wrong", "L1")
    monkeypatch.setattr(cascade, "_inner_rule", lambda lenience: wrong)
    np.testing.assert_allclose(first_token.__wrapped__(), [0.32, 0.5, 0.18], atol=1e-12)


def no_residual(monkeypatch):
    wrong = Accept(rules.resample_from_target, CHAIN.greedy, "wrong", "L1")
    monkeypatch.setattr(cascade, "_inner_rule", lambda lenience: wrong)


def lenient_while_sampling(monkeypatch):
    wrong = lenient.make(lenience=0.4)
    monkeypatch.setattr(cascade, "_inner_rule", lambda lenience: wrong)


def overshoot_by_value(monkeypatch):
    """Of the last token, it keeps one that is not 0."""
    draw = _system.draw

    def wrong(*args):
        drawn, logits, state = draw(*args)
        last = jnp.arange(drawn.tokens.shape[1]) == drawn.tokens.shape[1] - 1
        return drawn.replace(valid=drawn.valid & ~(last & (drawn.tokens == 0))), logits, state

    monkeypatch.setattr(_system, "draw", wrong)


def probs_of_the_smaller_model(monkeypatch):
    """Declares the tokens of the first model with the probabilities of the second one."""
    right = _system._probs_of

    def wrong(context, tokens, logits):
        place = context.length[:, None] + jnp.arange(-2, 0)
        text = jnp.take_along_axis(context.tokens, place, axis=1)
        text = jnp.concatenate([text, tokens], 1)
        size = tokens.shape[1]
        return right(context, tokens, cases.table(2, V)[text[:, :size], text[:, 1 : size + 1]])

    monkeypatch.setattr(_system, "_probs_of", wrong)


def probs_of_the_place_before(monkeypatch):
    """Declares each token with the probabilities of the token before it."""
    right = _system._probs_of

    def wrong(context, tokens, logits):
        return right(context, tokens, jnp.roll(logits, 1, axis=1))

    monkeypatch.setattr(_system, "_probs_of", wrong)


MUTANTS = (
    no_residual,
    lenient_while_sampling,
    overshoot_by_value,
    probs_of_the_smaller_model,
    probs_of_the_place_before,
)


@pytest.mark.parametrize("mutant", by_default(MUTANTS, MUTANTS[2:3]))
def test_mutants_of_the_inner_system_change_the_law(mutant, monkeypatch):
    mutant(monkeypatch)
    target, drafter, params = made("2,0,0;1,0;0")
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        result = exact.enumerated(target, drafter, CHAIN, wide, [0, 1], 3, rounds=1)
    assert testing.total_variation(result.law, result.truth) > 1e-3


@pytest.mark.parametrize("shared", by_default(["rounds", "levels"], ["rounds"]))
@pytest.mark.slow
def test_keys_that_two_inner_rounds_share_are_noticed(shared, monkeypatch):
    target, drafter, params = made("2,0,0;1,0;0")
    if shared == "rounds":
        one = _inner_rounds._round

        def wrong(system, model, below, keys, context, run):
            prefix = (*keys._prefix[:-1], 0)
            keys = exact._Script(keys.branches, keys.ledger, prefix, prefix)
            return one(system, model, below, keys, context, run)

        monkeypatch.setattr(_inner_rounds, "_round", wrong)
    else:
        monkeypatch.setattr(exact._Script, "inner", lambda self, index, same_target=False: self)
    with pytest.raises(NoiseReused):
        exact.enumerated(target, drafter, CHAIN, params, [0, 1], 3, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", SHAPES)
def test_the_compiled_loop_has_the_targets_law(lengths):
    target, drafter, params = made(lengths, vocab=3)
    for settings in ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}):
        fit = loop.loop_fit(target, drafter, CHAIN, params, [2, 1, 2, 1], 5, 120_000, **settings)
        assert fit.p_value > 1e-4 and fit.detectable < 0.02


PROMPTS = [[1, 2, 0, 3, 1, 2], [4], [0, 0, 5, 0, 0], [3, 3]]


@functools.cache
def real_models():
    """Three decoders: the target, a draft model that is like it, and a smaller one."""
    target, params = testing.tiny(vocab_size=8, seed=0)
    noise = jax.tree.map(lambda x: 1.05 * x, params)
    small, small_params = testing.tiny("gpt2", vocab_size=8, seed=1, layers=1)
    return (target, target, small), (params, noise, small_params)


@functools.cache
def real(lengths, lenience=1.0):
    (target, middle, small), (params, first, second) = real_models()
    drafter = drafters.make(
        "cascade",
        target,
        models=[middle, small],
        params=[first, second],
        lengths=lengths,
        lenience=lenience,
    )
    return target, drafter, ModelParams(params, drafter.init_params(None))


def begin(drafter, params, temperature=0.0, new=24):
    target = real_models()[0][0]
    packed, lengths = decode.pack_prompts(PROMPTS)
    state = decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, 4),
        max_len=6 + new,
        limit=lengths + new - jnp.array([0, 3, 5, 0]),
        sampling=sampling.make_sampling(4, temperature),
    )
    return target, state, lengths


@functools.cache
def plain(temperature=0.0):
    none = drafters.make("none", real_models()[0][0])
    params = ModelParams(real_models()[1][0])
    target, state, lengths = begin(none, params, temperature)
    return decode.outputs(decode.autoregressive(target, params, state, max_steps=24), lengths)


REAL = ("3,0,0;2,0;4", "2,2,3;1,2;3", "4,0,0;2,0;0", "1,3,0;2,0;1")


@pytest.mark.parametrize(
    ("lengths", "lenience"),
    by_default([*((x, 1.0) for x in REAL), (REAL[1], 0.3)], ()),
)
def test_greedy_text_is_the_targets_in_ragged_batches(lengths, lenience):
    _, drafter, params = real(lengths, lenience)
    target, state, sizes = begin(drafter, params)
    state, records = decode.generate(target, drafter, CHAIN, params, state, max_steps=24)
    decode.check(state)
    assert decode.outputs(state, sizes) == plain()
    # The first model is almost the target: whole drafts are accepted, and caches lag behind.
    assert np.asarray(records.accepted).max() == drafter.nodes or lenience < 1


@pytest.mark.parametrize("lengths", by_default(REAL, REAL[1:2]))
@pytest.mark.slow
def test_its_caches_follow_the_text(lengths):
    target, drafter, params = real(lengths)
    finding = testing.state_follows_text(drafter, target, params)
    assert finding.passed, finding


def test_one_token_vocabularies_and_other_mistakes_are_refused():
    target, first, second = cases.models(3)
    other = cases.models(4)[1]
    both = {"models": [first, second]}
    for keys, message in [
        ({"models": [first, other]}, "the draft model has a vocabulary of 4 and the target of 3"),
        ({"models": [first], "params": [1, 2]}, "there are 1 models and 2 params"),
        ({**both, "lengths": "1,2;3"}, "lengths has 2 rows; with 2 models it needs 3"),
        ({**both, "lengths": "1,2;3;1"}, "row 1 of lengths has 2 numbers; it needs 3"),
        ({**both, "lengths": "1,x,1;1,1;1"}, "give rows of whole numbers, as in '5,14,10;1,10;10'"),
        ({**both, "lengths": [[1, 0, 0], [-1, 0], [0]]}, "a length of the cascade is -1"),
        ({**both, "lengths": "0,0,0;1,1;1"}, "no tokens in its first row"),
        ({**both, "lengths": "1,0,1;0,1;1"}, "lengths uses no token of model 2 (of 2)"),
        ({**both, "lenience": 0.0}, "lenience is 0.0; it must be a number in (0, 1]"),
        ({**both, "drafters": {"jacobi": {}}}, "jacobi reads the output of the model"),
        (
            {**both, "drafters": {"prompt_lookup": {"gamma": 2}}},
            "lengths has 10 tokens of prompt_lookup, which drafts 2",
        ),
        (
            {**both, "lengths": "1,0,0;1,0;0", "drafters": {"prompt_lookup": {}}},
            "lengths has no tokens of the lookup; leave drafters out",
        ),
        ({**both, "drafters": {"trie": {}}}, "cascade takes drafts that are chains; trie drafts"),
        ({**both, "drafters": {"nope": {}}}, "unknown drafter 'nope'"),
    ]:
        with pytest.raises(UserError) as error:
            drafters.make("cascade", target, **keys)
        assert message in str(error.value) and "\n" not in str(error.value)
    without = drafters.make("cascade", target, **both)
    with pytest.raises(UserError, match="cascade was made from LMs without params"):
        without.init_params(None)


def test_lengths_are_read_in_the_published_form_too():
    published = [[5, 14, 10], [0, 1, 10], [0, 0, 10]]
    assert _lengths.parse(published, 2) == _lengths.parse("5,14,10;1,10;10", 2)
    assert _lengths.parse(None, 2) == ((5, 0, 0), (3, 0), (10,))
    assert _lengths.parse(None, 1) == ((5, 0), (10,))


def test_lenience_is_for_temperature_0_and_harmless_in_sampled_rows():
    target, drafter, params = made("1,0,0;1,0;0", lenience=0.2)
    exact = made("1,0,0;1,0;0")[1]
    assert drafter.greedy_only and not exact.greedy_only
    # The tokens of greedy rows need not be the first model's best ones.
    assert exact.probs is not None and exact.training is not None
    assert drafter.probs is None and drafter.training is None
    finding = law_checks.check_law(target, drafter, CHAIN, params, [[0, 1]], count=False)
    assert finding.passed, finding
