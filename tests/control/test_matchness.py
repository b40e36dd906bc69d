"""The adaptive threshold of Draft & Verify: when it stops, how it moves, and the output law."""

from __future__ import annotations

import cases
import growth_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, control, decode, drafters, rng, sampling, step, testing
from specjax.control import Ahead
from specjax.errors import UserError
from specjax.types import Context, Draft, ModelParams, Verdict


def rows(count):
    """A context of so many rows."""
    tokens, length = jnp.zeros((count, 1), jnp.int32), jnp.ones((count,), jnp.int32)
    return Context(tokens, length, sampling.make_sampling(count, 1.0))


def ahead(depth, probs, valid=None):
    """What the controller is asked, with the probabilities of the places' newest tokens."""
    probs = jnp.asarray(probs)
    valid = jnp.ones(probs.shape, bool) if valid is None else jnp.asarray(valid)
    return Ahead(depth, jnp.zeros((*probs.shape, 2)), jnp.log(probs), valid, jnp.log(probs))


@pytest.mark.fast
def test_it_stops_after_an_unsure_token():
    """At every place of a tree; the pending token is always sure."""
    own = control.load("matchness", start=0.5)
    state = own.init(rows(4))
    answer, state = own.ask(state, ahead(0, np.ones((4, 1))))
    assert answer.all() and (state.levels == 1).all() and not state.stopped.any()
    probs = [[0.5, 0.1], [0.4, 0.3], [0.1, 0.9], [0.1, 0.9]]
    valid = [[True, True], [True, True], [True, True], [True, False]]
    answer, state = own.ask(state, ahead(1, probs, valid))
    assert answer.tolist() == [True, False, True, False]
    assert state.levels.tolist() == [2, 1, 2, 1]
    assert state.stopped.tolist() == [False, True, False, True]


def reference(threshold, share, accepted, drafted, most):
    """The rule of the paper, one round of one row."""
    share = 0.5 * share + 0.5 * accepted / drafted
    aim = threshold
    if share < 0.9:
        aim += 0.01
    elif drafted < most:
        aim -= 0.01
    return min(max(0.9 * threshold + 0.1 * aim, 0.0), 1.0), share


@pytest.mark.fast
@pytest.mark.parametrize("start", [0.0, 0.6, 1.0])
def test_it_moves_as_published(start):
    """40 rounds of four rows: one accepts all of full drafts, one all of shorter drafts."""
    most, own = 4, control.load("matchness", start=start)
    state, draw = own.init(rows(4)), np.random.default_rng(0)
    expected = [(start, 0.0)] * 4
    for _ in range(40):
        drafted = np.array([most, 2, *draw.integers(1, most + 1, 2)])
        accepted = np.array([most, 2, draw.integers(0, drafted[2] + 1), 0])
        for depth in range(most):
            live = drafted > depth - 1  # rows that were not stopped before
            answer = drafted > depth
            asked = ahead(depth, np.where(answer, 1.0, 0.0)[:, None], answer[:, None])
            new = own.ask(state, asked)[1]
            keep = jnp.asarray(live)
            state = jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, state)  # noqa: B023
        path = jnp.where(jnp.arange(most) < jnp.asarray(accepted)[:, None], jnp.arange(most), -1)
        verdict = Verdict(jnp.zeros((4, most + 1), jnp.int32), jnp.asarray(accepted + 1), path)
        draft = Draft(jnp.zeros((4, most), jnp.int32), jnp.ones((4, most), bool))
        state = own.update(state, draft, verdict)
        expected = [
            reference(*old, a, d, most)
            for old, a, d in zip(expected, accepted, drafted, strict=True)
        ]
        np.testing.assert_allclose(state.threshold, [x for x, _ in expected], atol=1e-5)
        np.testing.assert_allclose(state.share, [x for _, x in expected], atol=1e-5)
    again = own.update(state, draft, verdict)
    np.testing.assert_array_equal(again.threshold, state.threshold)


def unsure(seed=3):
    """A draft model for the table target, and the parameters of the pair."""
    target, draft, _ = cases.models()
    return target, draft, ModelParams(cases.table(0), cases.table(seed))


def test_the_unsure_token_is_submitted_and_the_next_is_not():
    """Each draft ends with the first token below the threshold, or has full length."""
    target, draft, params = unsure()
    keys = {"model": draft, "gamma": 4, "control": "matchness:0.4,0.9,0,1"}
    drafter = drafters.make("draft_model", target, **keys)
    rows = 64
    packed, lengths = decode.pack_prompts(
        np.random.default_rng(0).integers(0, 3, (rows, 2)).tolist()
    )
    settings = sampling.make_sampling(rows, 1.0)
    state = decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, rows),
        max_len=12,
        sampling=settings,
    )
    noise = rng.RowKeys(state.keys, state.round, state.length, nodes=4)
    result, _ = jax.jit(drafter.propose)(params, noise, step.context_of(state), state.draft)
    probs = np.take_along_axis(np.asarray(result.probs), np.asarray(result.tokens)[..., None], -1)[
        ..., 0
    ]
    valid, counts = np.asarray(result.valid), set()
    for row in range(rows):
        length = int(valid[row].sum())
        assert valid[row, :length].all()
        assert (probs[row, : length - 1] >= 0.4).all()
        assert length == 4 or probs[row, length - 1] < 0.4
        counts.add(length)
    assert len(counts) > 2


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"gamma": 3}, "chain"),
        pytest.param({"gamma": 3}, "block", marks=pytest.mark.slow),
        pytest.param({"gamma": 3}, "match", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_exact_law_of_chains(keys, rule):
    """The length depends on the drawn tokens that stay; with temperature and top-k too."""
    with jax.enable_x64(True):
        target, draft, params = unsure()
        drafter = drafters.make(
            "draft_model", target, model=draft, control="matchness:0.5,0.9,0.2,0.5", **keys
        )
        for settings in ({"temperature": 1.0}, {"temperature": 0.6, "top_k": 2}):
            assert shared.law_error(drafter, rule, target, params, **settings) < shared.EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"tree": "2x1", "siblings": "iid"}, "recursive"),
        ({"tree": "2x1", "siblings": "iid"}, "k_seq"),
        ({"tree": "2x1", "siblings": "iid"}, "gbv"),
        ({"tree": "2x1", "siblings": "without_replacement"}, "recursive"),
        ({"tree": "2x1", "siblings": "without_replacement"}, "traversal"),
        ({"tree": "dynamic", "nodes": 5, "depth": 2, "top_k": 2}, "deterministic"),
    ],
)
def test_exact_law_of_trees(keys, rule):
    with jax.enable_x64(True):
        target, draft, params = unsure()
        own = {"model": draft, "control": "matchness:0.5,0.9,0.2,0.5"}
        drafter = drafters.make("draft_tree", target, **own, **keys)
        assert shared.law_error(drafter, rule, target, params) < shared.EXACT


@pytest.mark.slow
def test_exact_law_of_later_rounds():
    """Thresholds that earlier rounds moved: the law of three rounds together."""
    with jax.enable_x64(True):
        target, draft, params = unsure()
        drafter = drafters.make(
            "draft_model", target, model=draft, gamma=2, control="matchness:0.4,0.9,1,0"
        )
        law = testing.exact_law(
            target, drafter, accept.load("chain"), params, [2, 1], 3, rounds=3, temperature=1.0
        )
        truth = testing.sequence_law(target, params.target, [2, 1], 3, temperature=1.0)
        assert testing.total_variation(law, truth) < shared.EXACT


@pytest.mark.fast
@pytest.mark.parametrize("key", ["start", "target", "step", "keep", "memory"])
def test_errors(key):
    for value in (-0.1, 1.5, float("nan"), True):
        with pytest.raises(UserError, match=f"matchness's {key} is .* a number in .0, 1."):
            control.load("matchness", **{key: value})
    assert control.parse("matchness:0.5").name == "matchness:0.5"
