"""BiLD: the draft's length follows the confidence, and the rule "rollback" at its limits."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling
from specjax.errors import UserError
from specjax.testing import laws, loop
from specjax.types import Draft, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "bild": (
        "bild",
        {"gamma": 2, "fallback": 0.5, "model": "@draft", "params": "@draft params"},
        ("chain",),
    ),
}

V, NEW = 5, 24
PROMPTS = [[1, 2, 0, 3], [4], [0, 0], [3, 3, 1]]
THRESHOLDS = (0.0, 1.5, 100.0)


@functools.cache
def made(fallback=0.5):
    target, draft, _ = cases.models(V)
    drafter = drafters.make(
        "bild", target, model=draft, params=cases.table(1, V), fallback=fallback, gamma=4
    )
    return target, drafter, ModelParams(cases.table(0, V), drafter.init_params(None))


def begin(drafter, params):
    packed, lengths = decode.pack_prompts(PROMPTS)
    state = decode.prefill(
        made()[0],
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, 4),
        max_len=4 + NEW,
        limit=lengths + NEW,
        sampling=sampling.make_sampling(4, 0.0),
    )
    return state, lengths


@functools.cache
def decoded(threshold):
    target, drafter, params = made()
    state, lengths = begin(drafter, params)
    rule = accept.load("rollback", threshold=threshold)
    state, records = decode.generate(target, drafter, rule, params, state, max_steps=NEW)
    return decode.outputs(state, lengths), jax.tree.map(np.asarray, records)


def test_threshold_0_is_greedy_decoding_and_acceptance_grows_with_it():
    target, _, params = made()
    none = drafters.make("none", target)
    state, lengths = begin(none, ModelParams(params.target))
    state = decode.autoregressive(target, ModelParams(params.target), state, max_steps=NEW)
    plain = decode.outputs(state, lengths)
    assert decoded(0.0)[0] == plain and decoded(100.0)[0] != plain
    shares = []
    for threshold in THRESHOLDS:
        records = decoded(threshold)[1]
        assert records.drafted.max() <= 4
        shares.append(records.accepted.sum() / records.drafted.sum())
    assert shares == sorted(shares) and shares[-1] == 1 > shares[0]


@pytest.mark.fast
def test_of_one_draft_more_is_kept_at_a_larger_threshold():
    generator = np.random.default_rng(0)
    logits = jnp.asarray(generator.normal(size=(200, 5, V)) * 2, jnp.float32)
    draft = Draft(
        jnp.asarray(generator.integers(0, V, (200, 4)), jnp.int32), jnp.ones((200, 4), bool)
    )
    loss = -np.asarray(jax.nn.log_softmax(logits, -1))
    tokens, best = np.asarray(draft.tokens), np.asarray(logits).argmax(-1)
    own = np.take_along_axis(loss[:, :-1], tokens[..., None], -1)[..., 0]
    before = np.zeros(200, int)
    for threshold in THRESHOLDS:
        verdict = accept.load("rollback", threshold=threshold).greedy(draft, logits)
        kept = np.cumprod((own <= threshold) | (tokens == best[:, :-1]), 1).sum(1)
        np.testing.assert_array_equal((np.asarray(verdict.path) >= 0).sum(1), kept)
        newest = np.take_along_axis(np.asarray(verdict.tokens), kept[:, None], 1)[:, 0]
        np.testing.assert_array_equal(newest, best[np.arange(200), kept])
        assert (kept >= before).all()
        before = kept
    assert (before == 4).all()


def test_a_draft_ends_where_the_model_is_not_sure():
    _, drafter, params = made(fallback=0.4)
    state, _ = begin(drafter, params)
    keys = rng.RowKeys(state.keys, state.round, state.length)
    context = decode.step_lib.context_of(state)
    draft = jax.jit(drafter.propose)(params, keys, context, state.draft)[0]
    table = jax.nn.softmax(cases.table(1, V), -1)
    lengths = []
    for row, prompt in enumerate(PROMPTS):
        text = [V, *prompt]
        expected = []
        while len(expected) < 4 and (probs := table[text[-2], text[-1]]).max() >= 0.4:
            expected.append(int(probs.argmax()))
            text.append(expected[-1])
        valid = np.asarray(draft.valid[row])
        assert np.asarray(draft.tokens[row])[valid].tolist() == expected
        lengths.append(len(expected))
    assert len(set(lengths)) > 1


@pytest.mark.slow
def test_with_the_rule_chain_sampled_text_is_exact():
    target, drafter, params = made()
    fit = loop.loop_fit(target, drafter, accept.load("chain"), params, [1, 2], 4, 120_000)
    assert fit.p_value > 1e-4
    assert laws.sequence_law(target, params.target, [1, 2], 1).sum() == pytest.approx(1)


@pytest.mark.fast
def test_wrong_keys_are_refused():
    target, draft, _ = cases.models(V)
    for keys, message in [
        ({"fallback": 1.5}, "fallback is 1.5; it must be a number in [0, 1]"),
        ({"gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        ({"model": cases.models(4)[1]}, "a vocabulary of 4 and the target of 5"),
    ]:
        with pytest.raises(UserError) as error:
            drafters.make("bild", target, **{"model": draft, **keys})
        assert message in str(error.value)
