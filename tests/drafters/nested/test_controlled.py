"""Controlled acceptance: the rate at every depth, plain greedy text, the inner drafter's cost."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, testing, theory
from specjax.bench import metrics
from specjax.errors import UserError
from specjax.types import Context, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "controlled": (
        "controlled",
        {
            "drafters": [
                (
                    "draft_tree",
                    {
                        "tree": "2x1",
                        "siblings": "top_k",
                        "model": "@draft",
                        "params": "@draft params",
                    },
                )
            ],
            "rate": 0.6,
        },
        ("recursive",),
    ),
}

V, ROWS, NEW = 5, 64, 60
TARGET, DRAFT, _ = cases.models(V)
PROMPTS = [[1, 2, 0, 3], [4], [0, 0]] * (ROWS // 3 + 1)


@functools.cache
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


@functools.cache
def controlled(name):
    return drafters.make("controlled", TARGET, drafters=[inner(name)])


def begin(drafter, params, new):
    packed, lengths = decode.pack_prompts(PROMPTS[:ROWS])
    state = decode.prefill(
        TARGET,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, ROWS),
        max_len=4 + new,
        limit=lengths + new,
        sampling=sampling.make_sampling(ROWS, 0.0),
    )
    return state, lengths


@functools.cache
def plain(new):
    params = ModelParams(cases.table(0, V))
    state, lengths = begin(drafters.make("none", TARGET), params, new)
    return decode.outputs(decode.autoregressive(TARGET, params, state, max_steps=new), lengths)


def decoded(name, rate, rule="match", new=NEW):
    """The records of a run with this rate, which is a parameter: one program serves all rates."""
    made = drafters.make("controlled", TARGET, drafters=[inner(name)], rate=rate)
    params = ModelParams(cases.table(0, V), made.init_params(jax.random.key(0)))
    drafter = controlled(name)
    assert (drafter.nodes, drafter.longest) == (made.nodes, made.longest) == (inner(name).nodes, 3)
    state, lengths = begin(drafter, params, new)
    state, records = decode.generate(
        TARGET, drafter, accept.load(rule), params, state, max_steps=new
    )
    assert decode.outputs(state, lengths) == plain(new)
    return records


@pytest.mark.parametrize(
    ("name", "rate"),
    by_default(
        [("chain", 0.3), ("chain", 0.9), ("tree", 0.6), ("dynamic", 0.6)],
        [("chain", 0.3), ("chain", 0.9), ("tree", 0.6)],
    ),
)
def test_acceptance_has_the_chosen_rate(name, rate):
    records = decoded(name, rate)
    # Before any row reaches its limit.
    early = type(records)(*(np.asarray(x)[: NEW // 4] for x in records))
    counts = metrics.count(early, [True] * ROWS, 3)
    for tested, passed in zip(counts.tested, counts.passed, strict=True):
        assert abs(passed - rate * tested) < 4 * np.sqrt(tested * rate * (1 - rate))


@pytest.mark.parametrize(("rate", "tau"), by_default([(0.0, 1.0), (1.0, 4.0)], [(1.0, 4.0)]))
def test_always_and_never(rate, tau):
    records = decoded("chain", rate, "chain", 24)
    emitted, accepted, tested = (
        np.asarray(x) for x in (records.emitted, records.accepted, records.tested)
    )
    assert (emitted[:5] == tau).all()
    # Also in the last rounds, where drafts reach beyond the limit.
    assert accepted.sum() == rate * tested.sum()


def test_the_inner_drafter_runs():
    """Its tokens are not used, but the compiled program does at least the inner drafter's work."""

    def flops(drafter):
        params = ModelParams(target_params, drafter.init_params(jax.random.key(0)))
        tokens = jnp.zeros((2, 12), jnp.int32)
        context = Context(tokens, jnp.full((2,), 4, jnp.int32), sampling.make_sampling(2, 0.0))
        slots = 16 + drafter.nodes
        # Only the shapes of the state are needed.
        state = jax.eval_shape(lambda p, c: drafter.init(p, c, None, slots), params, context)
        keys = rng.RowKeys(rng.row_keys(0, 2), jnp.zeros((), jnp.int32), context.length)
        run = jax.jit(lambda p, k, c, s: drafter.propose(p, k, c, s)[0])
        return run.lower(params, keys, context, state).compile().cost_analysis()["flops"]

    target, target_params = testing.tiny(vocab_size=16)
    draft, draft_params = testing.tiny(vocab_size=16, layers=1)
    alone = drafters.make("draft_model", target, model=draft, gamma=3, params=draft_params)
    nested = drafters.make("controlled", target, drafters=[alone])
    assert flops(nested) >= flops(alone)


def test_invalid_keys_are_refused():
    chain = inner("chain")
    drawn = drafters.make(
        "draft_tree", TARGET, model=DRAFT, tree="2x1", siblings="iid", params=cases.table(1, V)
    )
    for keys, message in [
        ({"drafters": []}, "controlled needs inner drafters, label -> keys; give at least one"),
        ({"drafters": [chain, chain]}, "controlled takes one inner drafter and got 2; give one"),
        (
            {"drafters": {"x": {"name": "none"}}},
            "controlled: none drafts no tokens; give another inner drafter",
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


# InferenceX, golden acceptance lengths by draft length (tests/theory/test_chain.py): Kimi-K3
# DSpark, and Qwen3.5-397B MTP.
GOLDEN = (
    "1.84,2.45,2.87,3.22,3.44,3.54,3.78,3.88",
    (1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21),
)


@functools.cache
def chain(gamma):
    return drafters.make("draft_model", TARGET, model=DRAFT, gamma=gamma, params=cases.table(1, V))


def rounds_of(gamma, rounds, **keys):
    """Tokens of rounds f[rounds,ROWS] before the limit, by a program that all lengths share."""
    made = drafters.make("controlled", TARGET, drafters=[chain(gamma)], **keys)
    params = ModelParams(cases.table(0, V), made.init_params(jax.random.key(0)))
    shared, new = drafters.make("controlled", TARGET, drafters=[chain(gamma)]), rounds * (gamma + 1)
    state, _ = begin(shared, params, new)
    rule = accept.load("match")
    _, records = decode.generate(TARGET, shared, rule, params, state, max_steps=rounds)
    return 1 + np.asarray(records.accepted)[:rounds]


@pytest.mark.parametrize("gamma", [3, 8])
@pytest.mark.parametrize("curve", GOLDEN, ids=["text", "numbers"])
def test_golden_curves_reproduce_their_length(gamma, curve):
    """Within 0.5 % over 10,048 rounds, with at most two lengths of a round."""
    emitted = rounds_of(gamma, 157, length=curve)
    values = curve.split(",") if isinstance(curve, str) else curve
    wanted = float(values[gamma - 1])
    assert emitted.size >= 10_000 and abs(emitted.mean() / wanted - 1) < 0.005
    assert set(np.unique(emitted)) == {int(wanted), int(wanted) + 1}


def test_independent_acceptance_reproduces_a_length():
    """One rate at every depth: the mean within four standard errors, and every depth its rate."""
    emitted = rounds_of(8, 157, length=3.54, schedule="independent")
    assert abs(emitted.mean() - 3.54) < 4 * emitted.std() / np.sqrt(emitted.size)
    rate = theory.equal_rate(3.54, 8)
    for depth in range(1, 9):
        reached, passed = (emitted >= depth).sum(), (emitted >= depth + 1).sum()
        assert abs(passed - rate * reached) < 4 * np.sqrt(reached * rate * (1 - rate))
    assert len(np.unique(emitted)) == 9


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"length": 3.0, "rate": 0.5}, "controlled takes a rate or a length, not both"),
        ({"length": 5.5}, "length is 5.5, and a round with 3 draft tokens has at most 4"),
        ({"length": (1.8, 2.4)}, "length has 2 values, and the inner drafter drafts 3 tokens"),
        ({"length": "fast"}, "length is 'fast'; give tokens per round, each at least 1"),
        ({"length": 0.5}, "length is 0.5; give tokens per round, each at least 1"),
        ({"length": "nan"}, "length is 'nan'; give tokens per round, each at least 1"),
        ({"schedule": "independent"}, "schedule is 'independent' and length is ()"),
        ({"length": 2, "schedule": "any"}, "schedule is 'any'"),
    ],
)
def test_lengths_that_are_refused(keys, message):
    with pytest.raises(UserError) as error:
        drafters.make("controlled", TARGET, drafters=[inner("chain")], **keys)
    assert str(error.value).startswith(message)
