"""MagicDec: a view of the whole text drafts exactly, a small one is checked by its laws."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.errors import UserError
from specjax.testing import claims, conformance, state_checks
from specjax.types import Context, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "magicdec": ("magicdec", {"budget": 3, "sinks": 1, "gamma": 2}, ("chain",)),
    "magicdec tree": (
        "magicdec",
        {
            "view": "retrieval",
            "budget": 2,
            "chunk": 2,
            "refresh": 2,
            "tree": "2x1",
            "siblings": "without_replacement",
        },
        (),
    ),
    "magicdec snapkv": (
        "magicdec",
        {"view": "snapkv", "budget": 3, "window": 1, "queries": 2, "pool": 1, "gamma": 2},
        (),
    ),
}

PROMPTS = [[1, 2, 3, 0, 4, 2, 2, 1], [4], [3, 1, 2, 0, 4], [2, 2]]
NEW = [20, 17, 20, 9]
TEMPERATURES = [0.0, 1.0, 0.7, 1.0]
# More tokens than any text has.
WHOLE = {
    "streaming": {"budget": 40, "sinks": 3},
    "snapkv": {"view": "snapkv", "budget": 40, "window": 6},
    "retrieval": {"view": "retrieval", "budget": 40, "refresh": 2},
}
SHAPES = {
    "chain": {"gamma": 3},
    "tree": {"tree": "2x2x1", "siblings": "without_replacement"},
    "controlled": {"gamma": 3, "control": "threshold:0.4"},
}
EVERY = [(view, shape) for view in WHOLE for shape in SHAPES]


@functools.cache
def models():
    target, params = testing.tiny("llama", 0, 20.0)
    return target, ModelParams(params)


def decoded(keys, temperatures=TEMPERATURES):
    """(texts, records, drafter) of four ragged rows."""
    target, params = models()
    drafter = drafters.make("magicdec", target, **keys)
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
    rule = accept.load(accept.default_rule(drafter))
    state, records = decode.generate(target, drafter, rule, params, state, max_steps=24)
    decode.check(state)
    assert bool(state.done.all())
    return decode.outputs(state, np.asarray(lengths)), records, drafter


@functools.cache
def plain():
    """The greedy texts of the target."""
    target, params = models()
    none = drafters.make("none", target)
    packed, lengths = decode.pack_prompts(PROMPTS)
    how = sampling.make_sampling(4, 0.0)
    keys = {"max_len": 32, "limit": lengths + jnp.asarray(NEW), "sampling": how}
    state = decode.prefill(target, none, params, packed, lengths, rng.row_keys(0, 4), **keys)
    state = decode.autoregressive(target, params, state, max_steps=24)
    return decode.outputs(state, np.asarray(lengths))


@pytest.mark.parametrize(("view", "shape"), by_default(EVERY, {("retrieval", "tree")}))
def test_a_view_of_the_whole_text_has_every_token_accepted(view, shape):
    texts, records, drafter = decoded(WHOLE[view] | SHAPES[shape])
    accepted, drafted = np.asarray(records.accepted), np.asarray(records.drafted)
    active = np.asarray(records.verified) > 0
    if shape == "controlled":
        assert np.array_equal(accepted[active], drafted[active])
    else:
        assert (accepted[active] == drafter.longest).all()
    assert texts[0] == plain()[0]


@pytest.mark.parametrize("view", by_default(list(WHOLE), {"snapkv"}))
def test_small_views_decode_the_greedy_text(view):
    small = {
        "streaming": {"budget": 4, "sinks": 1},
        "snapkv": {"view": "snapkv", "budget": 4, "window": 2, "queries": 3},
        "retrieval": {"view": "retrieval", "budget": 2, "chunk": 2, "refresh": 2},
    }[view]
    texts, records, _ = decoded({**small, "gamma": 3}, 0.0)
    assert texts == plain()
    accepted, tested = np.asarray(records.accepted).sum(), np.asarray(records.tested).sum()
    # The view matters: some tokens are rejected, and not all.
    assert 0 < accepted < tested


def work(slots, **keys):
    """Operations of the compiled ``propose`` with a cache of so many slots."""
    target, params = models()
    drafter = drafters.make("magicdec", target, budget=8, gamma=2, **keys)
    lengths = jnp.asarray([7])
    context = Context(
        jnp.zeros((1, slots), jnp.int32),
        lengths,
        sampling.make_sampling(1, 0.0),
        target.init_cache(1, slots).replace(length=lengths - 1),
    )
    state = jax.eval_shape(lambda: drafter.init(params, context, None, slots))
    keys = rng.RowKeys(rng.row_keys(0, 1), jnp.zeros((), jnp.int32), lengths)
    propose = jax.jit(lambda params, context, state: drafter.propose(params, keys, context, state))
    return propose.lower(params, context, state).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("view", by_default(["streaming", "snapkv"], {"streaming"}))
def test_the_work_of_a_draft_does_not_depend_on_the_context(view):
    keys = {"snapkv": {"view": view, "window": 4}}.get(view, {})
    assert work(64, **keys) == work(100, **keys)


@pytest.mark.parametrize("name", by_default(["magicdec", "magicdec tree", "magicdec snapkv"], ()))
def test_exact_laws(name):
    _, target, drafter, params = cases.case(name)
    rule = accept.load(accept.default_rule(drafter))
    for settings in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.85}):
        finding = conformance.check_law(
            target, drafter, rule, params, [cases.PROMPT, cases.REPEATED], after=(2,), **settings
        )
        assert finding.passed, str(finding)


@pytest.mark.slow
def test_the_law_of_a_round_is_enumerated():
    """Also that drafts are rejected in it: the view leaves out tokens that the target reads."""
    _, target, drafter, params = cases.case("magicdec")
    with jax.enable_x64():
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        result = testing.enumerated(
            target, drafter, accept.load("chain"), wide, cases.REPEATED, 3, rounds=1
        )
    assert np.abs(result.law - result.truth).sum() < 1e-12
    assert (result.accepted > 0.05).all()


def stale_view(drafter):
    """A mutant: the declared probs are those of another text than the tokens were drawn after."""

    def propose(params, keys, context, state):
        draft, after = drafter.propose(params, keys, context, state)
        other = context.replace(cache=context.cache.replace(length=context.cache.length - 1))
        declared, _ = drafter.propose(params, keys, other, state)
        return draft.replace(probs=declared.probs), after

    return drafter._replace(propose=propose)


def forgets_new_tokens(drafter):
    """A mutant: the view takes the newest tokens as read, and has none of them."""

    def propose(params, keys, context, state):
        kept = state.kept.replace(length=context.cache.length)
        return drafter.propose(params, keys, context, state.replace(kept=kept))

    return drafter._replace(propose=propose)


@pytest.mark.fast
def test_probs_of_another_view_are_detected():
    _, target, drafter, params = cases.case("magicdec")
    settings = ({"temperature": 1.0},)
    prompts = [cases.REPEATED]
    good = claims.drawn_as_declared(target, drafter, params, prompts, settings)
    bad = claims.drawn_as_declared(target, stale_view(drafter), params, prompts, settings)
    assert good.passed and bad.passed is False


@pytest.mark.slow
def test_a_view_that_forgets_new_tokens_is_detected():
    _, target, drafter, params = cases.real("magicdec")
    finding = state_checks.state_follows_text(forgets_new_tokens(drafter), target, params)
    assert finding.passed is False


@pytest.mark.fast
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"budget": 4}, "budget is 4 and sinks is 4: .* give a budget of at least 5"),
        ({"budget": 0}, "budget is 0; it must be a whole number >= 1"),
        ({"sinks": -1}, "sinks is -1; it must be a whole number >= 0"),
        ({"view": "h2o"}, "view is 'h2o'; it must be one of streaming, snapkv, retrieval"),
        ({"window": 8}, "window is 8 and the view is streaming; window belongs to the view snapkv"),
        ({"view": "snapkv", "budget": 32}, "budget is 32 and window is 32: .* at least 33"),
        ({"view": "snapkv", "pool": 4}, "pool is 4; it must be odd"),
        ({"view": "snapkv", "sinks": 4}, "sinks belongs to the view streaming"),
        ({"view": "retrieval", "budget": 12}, "budget is 12; it must be a multiple of chunk"),
        ({"view": "retrieval", "refresh": 0}, "refresh is 0; it must be a whole number >= 1"),
        ({"gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        ({"gamma": 2, "tree": "2x1"}, "magicdec was given gamma=2, a chain, and tree='2x1'"),
    ],
)
def test_bad_keys(keys, message):
    with pytest.raises(UserError, match=message):
        drafters.make("magicdec", models()[0], **keys)


@pytest.mark.fast
def test_a_target_without_keys_and_values_is_refused():
    with pytest.raises(UserError, match="tabular has none; take a decoder of specjax.models"):
        drafters.make("magicdec", testing.tabular(3))
