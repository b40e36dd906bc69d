"""A batch in parts has the gradient of the whole batch, for every term of a loss."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import close, make_optimiser

from specjax import drafters, testing
from specjax.train import evaluate, objectives, update
from specjax.types import Batch

V, LENGTH = 13, 9
LM, TARGET = testing.tiny(vocab_size=V, layers=1, width=16)
BEFORE = testing.tiny(vocab_size=V, layers=1, width=16, seed=1)[1]  # ``target_params``
HEADS = drafters.make("medusa", LM, heads=2)
KEY = jax.random.key(3)


def ragged() -> Batch:
    """Eight packed rows. Their shares of the labels of the next token and of later ones differ."""
    random = np.random.default_rng(0)
    lengths = [[9], [3, 3, 3], [2, 2, 2, 2], [5, 4], [2, 2], [4, 2], [8], []]
    segments = np.zeros((8, LENGTH), np.int32)
    for row, sizes in zip(segments, lengths, strict=True):
        ids = [number for number, size in enumerate(sizes, 1) for _ in range(size)]
        row[: len(ids)] = ids
    labelled = (segments > 0) & (random.random(segments.shape) < 0.8)
    tokens = random.integers(0, V, segments.shape).astype(np.int32)
    return jax.tree.map(jnp.asarray, Batch(tokens, labelled, segments))


@functools.cache
def joint(language: str):
    return objectives.joint_loss(LM, HEADS, language=language, heads=0.5, decay=0.8)


def start() -> dict:
    return {"target": TARGET, "draft": HEADS.training.start(TARGET, KEY)}


def after(loss, accumulate: int, batch: Batch):
    """The parameters after one step of gradient descent, and the metrics."""
    optimiser = make_optimiser("sgd", learning_rate=0.1, schedule="constant", warmup=0, clip=0.0)
    step = jax.jit(update.step(loss, optimiser, accumulate, 0.0))
    state, metrics = step(update.fresh(start(), optimiser, 0.0), BEFORE, batch, KEY)
    return state["params"], jax.device_get(metrics)


@pytest.mark.parametrize(
    ("language", "parts"), [("ce", (2, 8)), pytest.param("kl", (4,), marks=pytest.mark.slow)]
)
def test_each_term_of_a_joint_loss_counts_its_own_labels(language, parts):
    whole, expected = after(joint(language), 1, ragged())
    for accumulate in parts:
        params, metrics = after(joint(language), accumulate, ragged())
        assert close(params, whole, 1e-6)
        assert not close(params, start(), 1e-3)
        assert metrics["weight"] == expected["weight"]
        assert metrics["weight"]["language"] > 1.5 * metrics["weight"]["heads"]
        assert metrics["weight"]["agreement_1"] > 1.1 * metrics["weight"]["agreement_2"] > 0
        for name in ("loss", "language", "heads", "grad_norm", "agreement_1", "agreement_2"):
            assert metrics[name] == pytest.approx(expected[name], abs=1e-6)


def test_held_out_batches_are_averaged_by_the_labels_of_each_term():
    batch = ragged()
    parts = [jax.tree.map(lambda x, n=n: x[n : n + 2], batch) for n in (0, 2, 4, 6)]
    measure = evaluate.evaluator(joint("ce"))
    whole, together = measure(start(), BEFORE, [batch]), measure(start(), BEFORE, parts)
    assert whole["loss"] == pytest.approx(whole["language"] + 0.5 * whole["heads"], abs=1e-6)
    for name in ("loss", "language", "heads", "agreement_1", "agreement_2"):
        assert together[name] == pytest.approx(whole[name], abs=1e-6)


def test_the_models_do_not_run_to_count_labels():
    parts = jax.tree.map(lambda x: x.reshape(2, 4, LENGTH), ragged())
    keys, loss = jax.random.split(KEY, 2), joint("ce")

    def products(function, *args):
        text = jax.jit(function).lower(start(), BEFORE, *args).compile().as_text()
        return text.count(" dot(")

    assert products(loss, ragged(), KEY) > 0
    assert products(functools.partial(update.whole_weights, loss), parts, keys) == 0


def test_operations_of_products_are_those_of_all_turns():
    a, b = jnp.ones((3, 4)), jnp.ones((4, 5))
    once = 2 * 3 * 4 * 5

    def count(function, *values):
        return update.product_operations(jax.make_jaxpr(function)(*values).jaxpr)

    def turns(a, b):
        return jax.lax.scan(lambda total, _: (total + a @ b, None), a @ b, length=6)[0]

    def loss(a, b):
        return jnp.square(a @ b).sum()

    def branches(a, b):
        return jax.lax.cond(a.sum() > 0, lambda: a @ b, lambda: 2 * (a @ b) + a @ b)

    assert count(jnp.matmul, a, b) == once
    assert count(jax.vmap(jnp.matmul), jnp.ones((7, 3, 4)), jnp.ones((7, 4, 5))) == 7 * once
    assert count(jax.jit(turns), a, b) == 7 * once
    # The gradient of a product: one product for each of the two.
    assert count(jax.grad(loss, (0, 1)), a, b) == 3 * once
    assert count(jax.grad(loss), a, b) == 2 * once
    again = jax.checkpoint(lambda a, b: jnp.sin(a @ b).sum())
    assert count(jax.value_and_grad(again, (0, 1)), a, b) == 4 * once
    assert count(branches, a, b) == 2 * once
    assert count(lambda a, b: (a @ b, 1)[1], a, b) == 0
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((3,), ("data",), axis_types=auto)
    rows = jax.sharding.PartitionSpec("data")
    nothing = jax.sharding.PartitionSpec()
    divided = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, nothing), out_specs=rows)
    assert count(divided, a, b) == once
