"""Controlled acceptance: the asked rate at every depth, plain greedy text, the inner drafter's whole cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.bench import metrics
from specjax.errors import UserError
from specjax.testing import cases
from specjax.types import Context, ModelParams

V, ROWS, NEW = 5, 64, 60
TARGET, DRAFT, _ = cases.models(V)
PROMPTS = [[1, 2, 0, 3], [4], [0, 0]] * (ROWS // 3 + 1)


def inner(name):
    params = cases.table(1, V)
    if name == "chain":
        return drafters.make("draft_model", TARGET, model=DRAFT, gamma=3, params=params)
    if name == "dynamic":
        return drafters.make(
            "dynamic_tree", TARGET, model=DRAFT, nodes=6, depth=3, top_k=2, params=params
        )
    return drafters.make(
        "draft_tree", TARGET, model=DRAFT, tree="2x2x1", siblings="top_k", params=params
    )


def decoded(drafter, rule="match", new=NEW):
    params = ModelParams(cases.table(0, V), drafter.init_params(jax.random.key(0)))
    packed, lengths = decode.pack_prompts(PROMPTS[:ROWS])
    settings = sampling.make_sampling(ROWS, 0.0)
    begin = lambda d: decode.prefill(  # noqa: E731
        TARGET,
        d,
        params,
        packed,
        lengths,
        rng.row_keys(0, ROWS),
        max_len=4 + new,
        limit=lengths + new,
        sampling=settings,
    )
    state, records = decode.generate(
        TARGET, drafter, accept.load(rule), params, begin(drafter), max_steps=new
    )
    plain = decode.autoregressive(
        TARGET, params, begin(drafters.make("none", TARGET)), max_steps=new
    )
    assert decode.outputs(state, lengths) == decode.outputs(plain, lengths)
    return records


@pytest.mark.parametrize(
    ("name", "rate"), [("chain", 0.3), ("chain", 0.9), ("tree", 0.6), ("dynamic", 0.6)]
)
def test_acceptance_is_what_was_asked_for(name, rate):
    drafter = drafters.make("controlled", TARGET, drafters=[inner(name)], rate=rate)
    assert (drafter.nodes, drafter.longest) == (inner(name).nodes, 3)
    records = decoded(drafter)
    early = type(records)(
        *(np.asarray(x)[: NEW // 4] for x in records)
    )  # before any row meets its limit
    found = metrics.count(early, [True] * ROWS, 3)
    for tested, passed in zip(found.tested, found.passed, strict=True):
        assert abs(passed - rate * tested) < 4 * np.sqrt(tested * rate * (1 - rate))


@pytest.mark.parametrize(("rate", "tau"), [(0.0, 1.0), (1.0, 4.0)])
def test_always_and_never(rate, tau):
    records = decoded(
        drafters.make("controlled", TARGET, drafters=[inner("chain")], rate=rate), "chain", 24
    )
    emitted, accepted, tested = (
        np.asarray(x) for x in (records.emitted, records.accepted, records.tested)
    )
    assert (emitted[:5] == tau).all()
    assert (
        accepted.sum() == rate * tested.sum()
    )  # in the last rounds too, where drafts lead beyond the limit


def test_the_inner_drafter_is_paid_for():
    """Its tokens are not used, and yet its model is run: the compiled rounds have as many products as its own."""

    def products(drafter):
        params = ModelParams({}, drafter.init_params(jax.random.key(0)))
        tokens = jnp.zeros((2, 12), jnp.int32)
        here = Context(tokens, jnp.full((2,), 4, jnp.int32), sampling.make_sampling(2, 0.0))
        params = params._replace(target=target_params)
        state = drafter.init(params, here, None, 16 + drafter.nodes)
        keys = rng.RowKeys(rng.row_keys(0, 2), jnp.zeros((), jnp.int32), here.length)
        run = jax.jit(lambda p, k, c, s: drafter.propose(p, k, c, s)[0])
        return run.lower(params, keys, here, state).compile().cost_analysis()["flops"]

    target, target_params = testing.tiny(vocab_size=16)
    draft, draft_params = testing.tiny(vocab_size=16, layers=1)
    alone = drafters.make("draft_model", target, model=draft, gamma=3, params=draft_params)
    paid = drafters.make("controlled", target, drafters=[alone])
    assert products(paid) >= products(alone)


def test_mistakes():
    chain = inner("chain")
    drawn = drafters.make(
        "draft_tree", TARGET, model=DRAFT, tree="2x1", siblings="iid", params=cases.table(1, V)
    )
    for keys, message in [
        ({"drafters": []}, "controlled needs drafters to ask, label -> keys; give at least one"),
        ({"drafters": [chain, chain]}, "controlled pays for one drafter and was given 2; give one"),
        (
            {"drafters": {"x": {"name": "none"}}},
            "controlled: none drafts nothing whose cost could be paid",
        ),
        ({"drafters": {"x": {"name": "nope"}}}, "unknown drafter 'nope'"),
        (
            {"drafters": [drawn]},
            "controlled takes chains and deterministic trees; draft_tree drafts iid siblings",
        ),
        ({"drafters": [chain], "rate": 1.5}, "rate is 1.5; it must be a number in [0, 1]"),
    ]:
        with pytest.raises(UserError) as error:
            drafters.make("controlled", TARGET, **keys)
        assert message in str(error.value)
