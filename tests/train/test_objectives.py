"""Objectives: closed forms, finite differences, and a minimum where the draft is the target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, testing
from specjax.errors import UserError
from specjax.models import lm
from specjax.testing import cases
from specjax.train import objectives, sources
from specjax.types import Batch

fast = pytest.mark.fast
TARGET = np.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]])
DRAFT = np.array([[[0.25, 0.25, 0.5], [0.1, 0.7, 0.2]]])
NAMES = tuple(objectives.DIVERGENCES)


def kl(first, second):
    return (first * np.log(first / second)).sum(-1)


def jsd(target, draft, beta=0.5):
    middle = beta * target + (1 - beta) * draft
    return beta * kl(target, middle) + (1 - beta) * kl(draft, middle)


PLAIN = {
    "forward_kl": kl,
    "reverse_kl": lambda target, draft: kl(draft, target),
    "jensen_shannon": jsd,
    "total_variation": lambda target, draft: np.abs(target - draft).sum(-1) / 2,
}


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
    assert objectives.jensen_shannon(target, draft, beta=0.9) == pytest.approx(
        jsd(TARGET, DRAFT, 0.9).mean(), abs=1e-5
    )
    assert objectives.overlap(target, draft) == pytest.approx((0.75 + 0.5) / 2, abs=1e-5)
    assert objectives.overlap(target, draft) == pytest.approx(
        1 - float(objectives.total_variation(target, draft)), abs=1e-5
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
    law = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)  # noqa: E731
    gradient = jax.grad(objectives.DIVERGENCES[name], argnums=1)(
        jnp.asarray(target), jnp.asarray(draft)
    )
    for place in np.ndindex(draft.shape):
        step = np.zeros_like(draft)
        step[place] = 1e-5
        up, down = (PLAIN[name](law(target), law(draft + sign * step)).mean() for sign in (1, -1))
        assert gradient[place] == pytest.approx((up - down) / 2e-5, abs=2e-4)


@fast
@pytest.mark.parametrize("name", NAMES)
def test_the_minimum_is_the_target(name):
    """Descent from elsewhere ends at the target's law; and at that law nothing pulls away from it."""
    target = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 4)))
    measure = objectives.DIVERGENCES[name]
    value, slope = jax.value_and_grad(measure, argnums=1)(target, target)
    assert abs(value) < 1e-6 and np.abs(slope).max() < (
        0.3 if name == "total_variation" else 1e-6
    )  # it has a kink there

    @jax.jit
    def descend(draft):
        rate = lambda i: 0.5 / (1 + i / 50)  # noqa: E731
        return jax.lax.fori_loop(
            0, 800, lambda i, x: x - rate(i) * jax.grad(measure, argnums=1)(target, x), draft
        )

    found = descend(jnp.zeros((1, 1, 4)))
    assert np.abs(jax.nn.softmax(found) - jax.nn.softmax(target)).max() < 0.02


@fast
def test_where_the_target_rules_tokens_out():
    target, draft = jnp.array([[[0.0, -jnp.inf, 0.0]]]), jnp.zeros((1, 1, 3))
    value, gradient = jax.value_and_grad(objectives.forward_kl, argnums=1)(target, draft)
    assert value == pytest.approx(np.log(1.5), abs=1e-6)
    assert gradient[0, 0] == pytest.approx(
        [1 / 3 - 1 / 2, 1 / 3, 1 / 3 - 1 / 2], abs=1e-6
    )  # draft - target
    assert np.isinf(objectives.reverse_kl(target, draft))
    for name in ("jensen_shannon", "total_variation"):
        value, gradient = jax.value_and_grad(objectives.DIVERGENCES[name], argnums=1)(target, draft)
        expected = PLAIN[name](np.array([0.5, 1e-12, 0.5]), np.full(3, 1 / 3))
        assert value == pytest.approx(expected, abs=1e-5) and np.isfinite(gradient).all()


# --- of a batch ------------------------------------------------------------------------------------------------------

V = 5
TABLE = testing.tabular(V)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, V, (2, 8)))
KEY = jax.random.key(0)


def test_only_labelled_tokens_of_their_own_document_count():
    labelled = jnp.asarray(np.random.default_rng(2).random((2, 8)) < 0.6)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
    batch = Batch(TOKENS, labelled & (segments > 0), segments)
    mine, theirs = cases.table(0, V), cases.table(1, V)
    value, metrics = objectives.distill_loss(TABLE, TABLE, temperature=2.0)(
        mine, theirs, batch, KEY
    )
    alone, count = 0.0, 0
    for row, start, end in ((0, 0, 3), (0, 3, 6), (1, 0, 2), (1, 2, 8)):
        tokens = TOKENS[row : row + 1, start:end]
        target, draft = (lm.forward(TABLE, p, tokens[:, :-1]).logits / 2.0 for p in (theirs, mine))
        mask = np.asarray(batch.labelled)[row, start + 1 : end]
        each = kl(*(np.asarray(jax.nn.softmax(x), np.float64) for x in (target, draft)))[0]
        alone, count = alone + each[mask].sum(), count + mask.sum()
    assert value == pytest.approx(alone / count, abs=1e-5) and metrics["weight"] == count


def test_no_gradient_reaches_a_frozen_target_and_pretraining_ignores_it():
    loss = objectives.distill_loss(TABLE, TABLE)
    mine, theirs = cases.table(0, V), cases.table(1, V)
    slope = jax.grad(lambda p: loss(mine, p, Batch(TOKENS), KEY)[0])(theirs)
    assert not np.asarray(slope).any()
    value, _ = objectives.pretrain_loss(TABLE)(mine, {}, Batch(TOKENS), KEY)
    chosen = jax.nn.log_softmax(lm.forward(TABLE, mine, TOKENS[:, :-1]).logits)
    assert value == pytest.approx(
        -float(jnp.take_along_axis(chosen, TOKENS[:, 1:, None], -1).mean()), abs=1e-5
    )


def test_the_target_learns_beside_its_heads():
    heads = drafters.make("medusa", TABLE, heads=2)
    target = cases.table(0, V)
    draft = heads.training.start(target, KEY)
    loss = objectives.joint_loss(TABLE, heads, language="kl", heads=0.5, decay=0.8)
    value, metrics = loss({"target": target, "draft": draft}, target, Batch(TOKENS), KEY)
    assert metrics["language"] == pytest.approx(0, abs=1e-6)  # it is still what it was
    own, _ = heads.training.loss(draft, target, Batch(TOKENS), KEY, decay=0.8)
    assert value == pytest.approx(0.5 * float(own), abs=1e-5)
    slope = jax.grad(lambda p: loss(p, target, Batch(TOKENS), KEY)[0])(
        {"target": target, "draft": draft}
    )
    assert np.asarray(slope["target"]).any()


def test_parts_of_a_batch_add_up_even_where_one_has_no_label():
    heads, table = drafters.make("medusa", TABLE, heads=2), cases.table(0, V)
    draft = heads.training.start(table, KEY)
    labelled = jnp.zeros((2, 8), bool).at[1, 3:7].set(True)
    whole, metrics = heads.training.loss(draft, table, Batch(TOKENS, labelled), KEY)
    parts = [
        heads.training.loss(draft, table, Batch(TOKENS[i : i + 1], labelled[i : i + 1]), KEY)
        for i in (0, 1)
    ]
    weights = [float(m["weight"]) for _, m in parts]
    assert weights == [0, float(metrics["weight"])]
    assert sum(w * float(v) for w, (v, _) in zip(weights, parts, strict=True)) / sum(
        weights
    ) == pytest.approx(float(whole))


@fast
@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"divergence": "kl"}, "loss.divergence is 'kl'; it must be one of forward_kl"),
        (
            {"divergence": "jensen_shannon", "beta": 1.0},
            "loss.beta is 1.0; it must be a number in (0, 1)",
        ),
        ({"beta": 0.2}, "loss.beta is 0.2 and belongs to jensen_shannon"),
        ({"temperature": 0.0}, "loss.temperature is 0.0; it must be a number > 0"),
    ],
)
def test_mistakes(keys, told):
    with pytest.raises(UserError, match=told.replace("(", r"\(").replace(")", r"\)")):
        objectives.distill_loss(TABLE, TABLE, **keys)


def test_the_draft_writes_its_own_text():
    """Chosen rows keep their beginning, go on with the draft's own law, and only that part is labelled."""
    table = cases.table(0, V, sparse=True)
    batch = Batch(jnp.tile(TOKENS, (100, 1)), segments=jnp.full((200, 8), 3))
    written = jax.jit(sources.on_policy(TABLE, 0.5, 3, 1.0))(table, {}, batch, KEY)
    chosen = np.asarray(~written.labelled[:, 0])
    assert 60 < chosen.sum() < 140
    assert np.array_equal(written.tokens[:, :3], batch.tokens[:, :3])
    assert (
        np.array_equal(written.tokens[~chosen], batch.tokens[~chosen])
        and written.labelled[~chosen].all()
    )
    assert (np.asarray(written.labelled)[chosen] == (np.arange(8) >= 3)).all()
    assert set(np.asarray(written.segments)[chosen].ravel()) == {1}
    logits = lm.forward(TABLE, table, written.tokens[:, :-1]).logits
    own = np.take_along_axis(
        np.asarray(jax.nn.softmax(logits)), np.asarray(written.tokens)[:, 1:, None], -1
    )[..., 0]
    assert (own[chosen][:, 2:] > 0).all()  # it never says what it rules out
    first = np.bincount(
        np.asarray(written.tokens)[chosen & (np.arange(200) % 2 == 0), 3], minlength=V
    )
    law = np.asarray(jax.nn.softmax(logits))[0, 2]
    assert np.abs(first / first.sum() - law).max() < 0.2
    again = jax.jit(sources.on_policy(TABLE, 0.5, 3, 1.0))(table, {}, batch, KEY)
    assert np.array_equal(again.tokens, written.tokens)
