"""Optimisers: matrices of stacked heads, schedules, clipping and decay, the rate of a target."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import E, close, initial, make_optimiser

from specjax.errors import UserError
from specjax.train import optimise
from specjax.train.settings import OPTIMISERS

pytestmark = pytest.mark.fast


def test_heads_are_stacked():
    """Muon treats each matrix of a stack as it treats it alone; no bias of a stack is decayed."""
    # Weights and gradients of three heads with one block.
    draw = jax.random.normal(jax.random.key(0), (2, 3, 1, E, E))
    stack, single = (
        {"block": {"kernel": x, "bias": jnp.ones(x.shape[:-1])}} for x in (draw[0], draw[0, 1, 0])
    )
    slopes = (
        {"block": {"kernel": x, "bias": jnp.zeros(x.shape[:-1])}} for x in (draw[1], draw[1, 1, 0])
    )
    changes = []
    for params, slope in zip((stack, single), slopes, strict=True):
        muon = optimise.optimiser(
            name="muon", steps=10, learning_rate=0.1, warmup=0.0, clip=0.0, weight_decay=0.5
        )
        changes.append(
            muon.transform.update(slope, muon.transform.init(params), params)[0]["block"]
        )
    assert np.allclose(changes[0]["kernel"][1, 0], changes[1]["kernel"], atol=1e-6)
    assert changes[1]["kernel"].any()
    assert not changes[0]["bias"].any() and not changes[1]["bias"].any()


def test_schedules():
    def rates(name, **changes):
        options = {"steps": 100, "learning_rate": 2.0, "warmup": 0.1} | changes
        options |= {"final": 0.25} if name in ("cosine", "linear") else {}
        schedule = optimise.optimiser(name="sgd", schedule=name, **options).schedule
        return [float(schedule(step)) for step in (0, 5, 10, 55, 100)]

    assert rates("cosine") == pytest.approx([0, 1, 2, 1.25, 0.5])
    assert rates("linear") == pytest.approx([0, 1, 2, 1.25, 0.5])
    assert rates("constant") == pytest.approx([0, 1, 2, 2, 2])
    assert rates("rsqrt") == pytest.approx([0, 1, 2, 2 / 5.5**0.5, 2 / 10**0.5])
    assert rates("linear", warmup=0) == pytest.approx([2, 1.925, 1.85, 1.175, 0.5])
    assert rates("rsqrt", warmup=0)[0] == 2


def _one_update(optimiser, params, grads):
    state = optimiser.transform.init(params)
    return optimiser.transform.update(grads, state, params)[0]


def test_clipping_and_decay():
    params = {"kernel": jnp.full((1, 2), 10.0), "scale": jnp.full(2, 10.0)}
    grads = {"kernel": jnp.array([[3.0, -9.0]]), "scale": jnp.array([4.0, 0.0])}
    plain = {"warmup": 0, "learning_rate": 1.0, "weight_decay": 0.0, "b1": 0.0}
    # Clipped by value to [3, -3], [3, 0], then by norm.
    both = make_optimiser("sgd", **plain, clip=1.0, clip_value=3.0)
    assert close(
        _one_update(both, params, grads),
        {"kernel": -np.array([[3, -3]]) / 27**0.5, "scale": -np.array([3, 0]) / 27**0.5},
    )
    by_value = make_optimiser("sgd", **plain, clip=0, clip_value=3.0)
    assert close(
        _one_update(by_value, params, grads),
        {"kernel": -np.array([[3, -3]]), "scale": -np.array([3, 0])},
    )
    unclipped = _one_update(make_optimiser("sgd", **plain, clip=0), params, grads)
    assert close(unclipped, jax.tree.map(lambda x: -x, grads))
    zeros = jax.tree.map(jnp.zeros_like, grads)
    for name in OPTIMISERS:
        optimiser = make_optimiser(name, warmup=0, learning_rate=1.0, weight_decay=0.1)
        decayed = _one_update(optimiser, params, zeros)
        assert close(decayed, {"kernel": np.full((1, 2), -1.0), "scale": np.zeros(2)}), name
    # Steps of lion and adamw have the size of the rate for any gradient; both take b2, adamw eps.
    for name, options in (("lion", {"b2": 0.9}), ("adamw", {"b2": 0.9, "eps": 1e-10})):
        options = {"warmup": 0, "learning_rate": 1.0, "weight_decay": 0.0} | options
        change = _one_update(make_optimiser(name, **options), params, grads)["kernel"]
        assert close(change, np.array([[-1, 1]]), 1e-4)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_separate_rate_for_the_target(name):
    pair = {"target": initial(), "draft": initial()}
    optimiser = make_optimiser(
        name, target_rate=0.25, target_from=3, warmup=0.5, weight_decay=0.0, clip=0.5
    )
    alone = make_optimiser(name, warmup=0.5, weight_decay=0.0, clip=0.5)
    apply = jax.jit(lambda grads, state, params: optimiser.transform.update(grads, state, params))
    apply_alone = jax.jit(lambda grads, state, params: alone.transform.update(grads, state, params))
    state, state_alone = optimiser.transform.init(pair), alone.transform.init(initial())
    for step in range(5):
        grads = jax.tree.map(functools.partial(jnp.multiply, step + 1), initial())
        updates, state = apply({"target": grads, "draft": grads}, state, pair)
        expected, state_alone = apply_alone(grads, state_alone, initial())
        if step < 3:  # as without a target
            assert close(updates["draft"], expected)
            assert not any(leaf.any() for leaf in jax.tree.leaves(updates["target"]))
    # From the fourth step on both change, the target at a quarter of the rate (in the fifth step
    # both have momentum).
    whole, part = (np.linalg.norm(updates[key]["head"]["kernel"]) for key in ("draft", "target"))
    assert 0.05 < part / whole < 0.5
    with pytest.raises(UserError, match="target_rate and target_from"):
        optimiser.transform.init(initial())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sgdd", {}, "name is 'sgdd'; it must be one of adamw, muon, sgd, lion"),
        (
            "adamw",
            {"schedule": "cos"},
            "schedule is 'cos'; it must be one of cosine, linear, constant, rsqrt",
        ),
        ("adamw", {"learning_rate": 0.0}, "learning_rate is 0.0; it must be a number > 0"),
        ("adamw", {"warmup": 1.0}, r"warmup is 1.0; it must be a number in \[0, 1\)"),
        ("adamw", {"b2": 1.5}, "b2 is 1.5"),
        ("adamw", {"clip": -1.0}, "clip is -1.0; it must be a number >= 0"),
        ("adamw", {"target_from": -1}, "target_from is -1"),
        ("sgd", {"b2": 0.9}, "on sgd, which averages no squares"),
        ("lion", {"eps": 1e-8}, "on lion, which does not divide"),
    ],
)
def test_invalid_optimisers(name, changes, message):
    with pytest.raises(UserError, match=message) as error:
        make_optimiser(name, **changes)
    assert "\n" not in str(error.value)
