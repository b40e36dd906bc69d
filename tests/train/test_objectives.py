"""Objectives: closed forms, finite differences, and a minimum where the draft is the target."""

from __future__ import annotations

import functools
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, testing
from specjax.errors import UserError
from specjax.models import lm
from specjax.train import objectives, writer
from specjax.types import Batch

fast = pytest.mark.fast
TARGET = np.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]])
DRAFT = np.array([[[0.25, 0.25, 0.5], [0.1, 0.7, 0.2]]])
NAMES = tuple(objectives.DIVERGENCES)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def kl(first, second):
    return (first * np.log(first / second)).sum(-1)


def jsd(target, draft, beta=0.5):
    middle = beta * target + (1 - beta) * draft
    return beta * kl(target, middle) + (1 - beta) * kl(draft, middle)


def hybrid(target, draft, alpha):
    """The LK loss with the weight of KL at the acceptance rate ``alpha``."""
    weight = np.exp(-3 * alpha)
    return weight * kl(target, draft) + (1 - weight) * np.abs(target - draft).sum(-1) / 2


PLAIN = {
    "forward_kl": kl,
    "reverse_kl": lambda target, draft: kl(draft, target),
    "jensen_shannon": jsd,
    "jeffreys": lambda target, draft: 0.9 * kl(target, draft) + 0.1 * kl(draft, target),
    "total_variation": lambda target, draft: np.abs(target - draft).sum(-1) / 2,
    "lk": lambda target, draft: -np.log(np.minimum(target, draft).sum(-1)),
    "lk_hybrid": lambda target, draft: hybrid(target, draft, np.minimum(target, draft).sum(-1)),
}
# Not differentiable where the draft is the target.
NOT_SMOOTH = ("total_variation", "lk", "lk_hybrid")


@fast
@pytest.mark.parametrize("shift", [0.0, 80.0])
def test_closed_forms(shift):
    target, draft = jnp.log(TARGET) + shift, jnp.log(DRAFT) - shift
    mask = jnp.array([[False, True]])
    for name, plain in PLAIN.items():
        measure, expected = objectives.DIVERGENCES[name], plain(TARGET, DRAFT)[0]
        assert measure(target, draft) == pytest.approx(expected.mean(), abs=1e-5), name
        assert measure(target, draft, mask) == pytest.approx(expected[1], abs=1e-5), name
        assert measure(target, target) == pytest.approx(0, abs=1e-5), name
    assert objectives.DIVERGENCES["jensen_shannon"](target, draft, beta=0.9) == pytest.approx(
        jsd(TARGET, DRAFT, 0.9).mean(), abs=1e-5
    )
    assert objectives.overlap(target, draft) == pytest.approx((0.75 + 0.5) / 2, abs=1e-5)
    assert objectives.overlap(target, draft) == pytest.approx(
        1 - float(objectives.DIVERGENCES["total_variation"](target, draft)), abs=1e-5
    )
    assert objectives.overlap(target, draft, mask) == pytest.approx(0.5, abs=1e-5)
    assert objectives.agreement(target, draft) == 0
    labels = jnp.array([[0, 2]])
    assert objectives.cross_entropy(target, labels) == pytest.approx(
        -np.log([0.5, 0.7]).mean(), abs=1e-5
    )
    assert objectives.cross_entropy(target, labels, mask) == pytest.approx(-np.log(0.7), abs=1e-5)


@fast
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_differences(name):
    rng = np.random.default_rng(3)
    target, draft = rng.normal(size=(2, 1, 2, 5)) * 1.5
    gradient = jax.grad(objectives.DIVERGENCES[name], argnums=1)(
        jnp.asarray(target), jnp.asarray(draft)
    )
    plain = PLAIN[name]
    if name == "lk_hybrid":
        # Its weight is a constant: that of the place at which the gradient is taken.
        alpha = np.minimum(softmax(target), softmax(draft)).sum(-1)
        plain = functools.partial(hybrid, alpha=alpha)
    for place in np.ndindex(draft.shape):
        step = np.zeros_like(draft)
        step[place] = 1e-5
        up, down = (plain(softmax(target), softmax(draft + sign * step)).mean() for sign in (1, -1))
        assert gradient[place] == pytest.approx((up - down) / 2e-5, abs=2e-4)


@fast
@pytest.mark.parametrize("name", NAMES)
def test_the_minimum_is_the_target(name):
    """Descent from another distribution ends at the target's, where the gradient is zero."""
    target = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 4)))
    measure = objectives.DIVERGENCES[name]
    value, slope = jax.value_and_grad(measure, argnums=1)(target, target)
    limit = 0.3 if name in NOT_SMOOTH else 1e-6
    assert abs(value) < 1e-6 and np.abs(slope).max() < limit

    @jax.jit
    def descend(draft):
        rate = lambda i: 0.5 / (1 + i / 50)  # noqa: E731
        return jax.lax.fori_loop(
            0, 800, lambda i, x: x - rate(i) * jax.grad(measure, argnums=1)(target, x), draft
        )

    result = descend(jnp.zeros((1, 1, 4)))
    assert np.abs(jax.nn.softmax(result) - jax.nn.softmax(target)).max() < 0.02


@fast
def test_tokens_of_target_probability_zero():
    target, draft = jnp.array([[[0.0, -jnp.inf, 0.0]]]), jnp.zeros((1, 1, 3))
    divergences = objectives.DIVERGENCES
    value, gradient = jax.value_and_grad(divergences["forward_kl"], argnums=1)(target, draft)
    assert value == pytest.approx(np.log(1.5), abs=1e-6)
    assert gradient[0, 0] == pytest.approx(
        [1 / 3 - 1 / 2, 1 / 3, 1 / 3 - 1 / 2], abs=1e-6
    )  # draft - target
    assert np.isinf(divergences["reverse_kl"](target, draft))
    for name in ("jensen_shannon", "total_variation", "lk", "lk_hybrid"):
        value, gradient = jax.value_and_grad(objectives.DIVERGENCES[name], argnums=1)(target, draft)
        expected = PLAIN[name](np.array([0.5, 1e-12, 0.5]), np.full(3, 1 / 3))
        assert value == pytest.approx(expected, abs=1e-5) and np.isfinite(gradient).all()


@fast
def test_acceptance_losses_learn_where_nothing_overlaps():
    """-log alpha keeps its gradient where total variation has none, also below float32's range."""
    target, draft = jnp.array([[[90.0, -90.0, -90.0]]]), jnp.array([[[-90.0, 0.0, 0.0]]])
    slopes = {
        name: jax.grad(objectives.DIVERGENCES[name], argnums=1)(target, draft)
        for name in ("total_variation", "lk", "lk_hybrid")
    }
    assert np.abs(slopes["total_variation"]).max() < 1e-6
    for name in ("lk", "lk_hybrid"):
        np.testing.assert_allclose(slopes[name][0, 0], [-1, 0.5, 0.5], atol=1e-4)
    apart = jnp.array([[[200.0, 0.0]]]), jnp.array([[[-200.0, 0.0]]])
    value, slope = jax.value_and_grad(objectives.DIVERGENCES["lk"], argnums=1)(*apart)
    assert value == pytest.approx(200 - np.log(2), rel=1e-5) and np.isfinite(slope).all()


# --- losses of a batch --------------------------------------------------------------------------

V = 5
LM = testing.tabular(V)
MINE, THEIRS = cases.table(0, V), cases.table(1, V)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, V, (2, 8)))
KEY = jax.random.key(0)
HEADS = drafters.make("medusa", LM, heads=2)


@jax.jit
def logits(params, tokens):
    """f32[B,T,V] of the tokens i32[B,T+1] without the last."""
    return lm.forward(LM, params, tokens[:, :-1]).logits


def test_only_labelled_tokens_inside_a_document_count():
    labelled = jnp.asarray(np.random.default_rng(2).random((2, 8)) < 0.6)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
    batch = Batch(TOKENS, labelled & (segments > 0), segments)
    loss = jax.jit(objectives.distill_loss(LM, LM, temperature=2.0))
    value, metrics = loss(MINE, THEIRS, batch, KEY)
    alone, count = 0.0, 0
    for row, start, end in ((0, 0, 3), (0, 3, 6), (1, 0, 2), (1, 2, 8)):
        # Padded behind the document, so that all have one shape.
        tokens = jnp.zeros((1, 8), TOKENS.dtype).at[0, : end - start].set(TOKENS[row, start:end])
        target, draft = (
            np.asarray(logits(params, tokens), np.float64)[0, : end - start - 1] / 2.0
            for params in (THEIRS, MINE)
        )
        mask = np.asarray(batch.labelled)[row, start + 1 : end]
        each = kl(softmax(target), softmax(draft))
        alone, count = alone + each[mask].sum(), count + mask.sum()
    assert value == pytest.approx(alone / count, abs=1e-5) and metrics["weight"] == count


def test_no_gradient_reaches_a_frozen_target_and_pretraining_ignores_it():
    loss = objectives.distill_loss(LM, LM)
    slope = jax.jit(jax.grad(lambda p: loss(MINE, p, Batch(TOKENS), KEY)[0]))(THEIRS)
    assert not np.asarray(slope).any()
    value, _ = jax.jit(objectives.pretrain_loss(LM))(MINE, {}, Batch(TOKENS), KEY)
    log_probs = np.log(softmax(np.asarray(logits(MINE, TOKENS), np.float64)))
    picked = np.take_along_axis(log_probs, np.asarray(TOKENS)[:, 1:, None], -1)
    assert value == pytest.approx(-picked.mean(), abs=1e-5)


def entropy(probs):
    return -(probs * np.log(probs)).sum(-1).mean()


@pytest.mark.parametrize("divergence", objectives.DIVERGENCES)
def test_the_loss_of_a_uniform_guess(divergence):
    """It is the loss of a draft whose logits are all equal."""
    loss = jax.jit(objectives.distill_loss(LM, LM, divergence=divergence))
    flat = jax.tree.map(jnp.zeros_like, MINE)
    value, metrics = loss(flat, THEIRS, Batch(TOKENS), KEY)
    assert metrics["uniform"] == pytest.approx(float(value), abs=1e-6)
    other, metrics = loss(MINE, THEIRS, Batch(TOKENS), KEY)
    assert metrics["uniform"] == pytest.approx(float(value), abs=1e-6) != float(other)
    if divergence == "forward_kl":
        target = softmax(np.asarray(logits(THEIRS, TOKENS), np.float64))
        assert value == pytest.approx(np.log(V) - entropy(target), abs=1e-5)
    _, metrics = jax.jit(objectives.pretrain_loss(LM))(MINE, {}, Batch(TOKENS), KEY)
    assert metrics["uniform"] == pytest.approx(np.log(V))


@pytest.mark.parametrize(
    "weights", [{}, {"decay": 0.5}, {"slots": "one"}, {"ce": 0.5, "teacher": 1.5, "decay": 0.8}]
)
def test_the_loss_of_heads_per_token(weights):
    """Heads with equal logits: the loss is ``uniform``, and log V for each head token."""
    draft = jax.tree.map(jnp.zeros_like, HEADS.training.start(MINE, KEY))
    loss = jax.jit(functools.partial(HEADS.training.loss, **weights))
    value, metrics = loss(draft, MINE, Batch(TOKENS), KEY)
    assert metrics["uniform"] == pytest.approx(float(value), rel=1e-5)
    per_token = float(value) / float(metrics["scale"])
    if not weights.get("teacher"):
        assert per_token == pytest.approx(np.log(V), rel=1e-5)
    else:
        # The divergence from the target is smaller by the target's entropy.
        assert 0.25 * np.log(V) < per_token < np.log(V)


def test_the_target_is_trained_with_its_heads():
    draft = HEADS.training.start(MINE, KEY)
    loss = objectives.joint_loss(LM, HEADS, language="kl", heads=0.5, decay=0.8)
    measure = jax.jit(jax.value_and_grad(lambda p: loss(p, MINE, Batch(TOKENS), KEY), has_aux=True))
    (value, metrics), slope = measure({"target": MINE, "draft": draft})
    assert metrics["language"] == pytest.approx(0, abs=1e-6)  # it has not changed yet
    own, _ = jax.jit(functools.partial(HEADS.training.loss, decay=0.8))(
        draft, MINE, Batch(TOKENS), KEY
    )
    assert value == pytest.approx(0.5 * float(own), abs=1e-5)
    assert np.asarray(slope["target"]).any()


def test_parts_of_a_batch_add_up_even_if_one_has_no_label():
    draft, loss = HEADS.training.start(MINE, KEY), jax.jit(HEADS.training.loss)
    labelled = jnp.zeros((2, 8), bool).at[1, 3:7].set(True)
    whole, metrics = loss(draft, MINE, Batch(TOKENS, labelled), KEY)
    parts = [loss(draft, MINE, Batch(TOKENS[i : i + 1], labelled[i : i + 1]), KEY) for i in (0, 1)]
    weights = [float(part["weight"]["loss"]) for _, part in parts]
    assert weights == [0, float(metrics["weight"]["loss"])]
    total = sum(weight * float(value) for weight, (value, _) in zip(weights, parts, strict=True))
    assert total / sum(weights) == pytest.approx(float(whole))


@fast
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"divergence": "kl"}, "loss.divergence is 'kl'; it must be one of forward_kl"),
        (
            {"divergence": "jensen_shannon", "beta": 1.0},
            "loss.beta is 1.0; it must be a number in (0, 1)",
        ),
        ({"beta": 0.2}, "loss.beta is 0.2, but only jensen_shannon has it"),
        ({"temperature": 0.0}, "loss.temperature is 0.0; it must be a number > 0"),
    ],
)
def test_errors(keys, message):
    with pytest.raises(UserError, match=re.escape(message)):
        objectives.distill_loss(LM, LM, **keys)


def test_the_draft_continues_rows():
    """Chosen rows keep their start, the draft continues them, and only its tokens are labelled."""
    table = cases.table(0, V, sparse=True)
    batch = Batch(jnp.tile(TOKENS, (100, 1)), segments=jnp.full((200, 8), 3))
    rewrite = jax.jit(writer.rewriter(LM, 0.5, 3, 1.0))
    written = rewrite(table, {}, batch, KEY)
    chosen = np.asarray(~written.labelled[:, 0])
    assert 60 < chosen.sum() < 140
    assert np.array_equal(written.tokens[:, :3], batch.tokens[:, :3])
    assert np.array_equal(written.tokens[~chosen], batch.tokens[~chosen])
    assert written.labelled[~chosen].all()
    assert (np.asarray(written.labelled)[chosen] == (np.arange(8) >= 3)).all()
    assert set(np.asarray(written.segments)[chosen].ravel()) == {1}
    probs = np.asarray(jax.nn.softmax(logits(table, written.tokens)))
    tokens = np.asarray(written.tokens)
    of_tokens = np.take_along_axis(probs, tokens[:, 1:, None], -1)[..., 0]
    assert (of_tokens[chosen][:, 2:] > 0).all()  # no token of probability 0
    first = np.bincount(tokens[chosen & (np.arange(200) % 2 == 0), 3], minlength=V)
    assert np.abs(first / first.sum() - probs[0, 2]).max() < 0.2
    assert np.array_equal(rewrite(table, {}, batch, KEY).tokens, written.tokens)
