"""The loss that all heads share, with Medusa heads: plain NumPy, gradients, errors."""

from __future__ import annotations

import functools

import cases
import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import silu, softmax
from internals import heads_along_text as _along_text
from internals import heads_depth_loss as _depth_loss
from internals import heads_heads as _heads
from marks import by_default

from specjax import drafters, testing
from specjax.errors import UserError
from specjax.models import lm
from specjax.train import objectives
from specjax.types import Batch, ModelParams

TARGET, TABLE = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)
TOKENS = np.array([[0, 1, 2, 3, 4], [4, 3, 1, 1, 0]], np.int32)
LABELLED = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], bool)
SEGMENTS = np.array([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])


def loss_by_hand(params, labelled, segments, ce, teacher, decay, heads=2, places=None):
    """(loss, agreement of each head, number of labels of the first)."""
    table = np.asarray(TABLE, np.float64)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    rows, size = TOKENS.shape[0], TOKENS.shape[1] - 1
    total, count, agreed = np.zeros(heads), np.zeros(heads), np.zeros(heads)

    def target_logits(b, s):
        """After position s, within its document."""
        alone = s == 0 or segments[b, s - 1] != segments[b, s]
        return table[shared.VOCAB if alone else TOKENS[b, s - 1], TOKENS[b, s]]

    def head_logits(feature, d):
        hidden = feature + silu(
            feature @ params["block"]["kernel"][d, 0] + params["block"]["bias"][d, 0]
        )
        return hidden @ params["head"]["kernel"][d]

    for b in range(rows):
        for s in range(size):
            for d in range(heads):
                # The token that head d of feature s predicts.
                at = s + 2 + d
                if at > size or not labelled[b, at] or segments[b, at] != segments[b, s]:
                    continue
                if places is not None and s not in places[b]:
                    continue
                logits = head_logits(target_logits(b, s), d)
                log_q, p = np.log(softmax(logits)), softmax(target_logits(b, at - 1))
                total[d] += ce * -log_q[TOKENS[b, at]] + teacher * (p * (np.log(p) - log_q)).sum()
                agreed[d] += logits.argmax() == p.argmax()
                count[d] += 1
    loss = (decay ** np.arange(heads) * total).sum() / count[0]
    return loss, agreed / np.maximum(count, 1), count


@pytest.mark.fast
@pytest.mark.parametrize(
    ("ce", "teacher", "decay"), [(1.0, 0.0, 1.0), (0.7, 0.4, 0.8), (0.0, 1.0, 0.5)]
)
@pytest.mark.parametrize("bounded", [False, True])
def test_loss_by_hand(ce, teacher, decay, bounded):
    drafter = cases.random_heads("medusa", TARGET, TABLE, heads=2)
    params = drafter.init_params(None)
    arrays = (TOKENS, LABELLED, SEGMENTS) if bounded else (TOKENS,)
    batch = Batch(*(jnp.asarray(x) for x in arrays))
    loss = jax.jit(functools.partial(drafter.training.loss, ce=ce, teacher=teacher, decay=decay))
    value, metrics = loss(params, TABLE, batch, jax.random.key(0))
    labelled, segments = (
        (LABELLED, SEGMENTS) if bounded else (np.ones_like(LABELLED), np.zeros_like(SEGMENTS))
    )
    expected, agreed, count = loss_by_hand(params, labelled, segments, ce, teacher, decay)
    assert value == pytest.approx(expected, rel=1e-5)
    assert [metrics["agreement_1"], metrics["agreement_2"]] == pytest.approx(agreed.tolist())
    counts = {name: metrics["weight"][name] for name in ("loss", "agreement_1", "agreement_2")}
    assert counts == {"loss": count[0], "agreement_1": count[0], "agreement_2": count[1]}


@pytest.mark.fast
def test_places_of_one_depth_are_refused():
    drafter = cases.random_heads("medusa", TARGET, TABLE, heads=2)
    with pytest.raises(UserError, match="loss.places is 2, and loss.slots 'one'"):
        params, batch = drafter.init_params(None), Batch(jnp.asarray(TOKENS))
        drafter.training.loss(params, TABLE, batch, jax.random.key(0), slots="one", places=2)


@pytest.mark.fast
def test_loss_of_some_places_by_hand():
    drafter = cases.random_heads("medusa", TARGET, TABLE, heads=2)
    params, batch = drafter.init_params(None), Batch(jnp.asarray(TOKENS), jnp.asarray(LABELLED))
    key = jax.random.key(0)
    loss = jax.jit(functools.partial(drafter.training.loss, teacher=0.4, places=2))
    value, metrics = loss(params, TABLE, batch, key)
    places = _along_text.random_places(jax.random.split(key)[0], batch, 2, 2, 2)
    keys = {"ce": 1.0, "teacher": 0.4, "decay": 1.0, "places": np.asarray(places)}
    expected, agreed, count = loss_by_hand(params, LABELLED, np.zeros_like(SEGMENTS), **keys)
    assert value == pytest.approx(expected, rel=1e-5)
    assert [metrics["agreement_1"], metrics["agreement_2"]] == pytest.approx(agreed.tolist())
    assert metrics["weight"]["loss"] == count[0]


@pytest.mark.parametrize(
    "name",
    by_default(
        ["hydra", "redrafter", "mlp_speculator", "mtp_module"],
        ["hydra", "redrafter", "mtp_module"],
    ),
)
def test_places_without_a_label_are_not_needed(name):
    """Heads that read the draft's tokens; the last of four features has no label."""
    keys = {"modules": 2} if name == "mtp_module" else {"heads": 2}
    drafter = cases.random_heads(name, TARGET, TABLE, **keys)
    params, batch = drafter.init_params(None), Batch(jnp.asarray(TOKENS))
    more = {"steps": 3} if name == "mtp_module" else {}
    loss = jax.jit(functools.partial(drafter.training.loss, **more), static_argnames="places")
    values = [loss(params, TABLE, batch, jax.random.key(0), places=n)[0] for n in (0, 3)]
    assert values[1] == pytest.approx(float(values[0]), rel=1e-5)


@pytest.mark.fast
@pytest.mark.parametrize(
    "weights",
    [
        pytest.param({"ce": 1.0}, marks=pytest.mark.slow),
        {"ce": 0.5, "teacher": 1.0, "decay": 0.8},
    ],
)
def test_gradients_are_finite_differences(weights):
    """Of the heads, and through the features of the target; the target's logits are constants."""
    with jax.enable_x64(True):

        def in_float64(tree):
            return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)

        drafter = cases.random_heads("medusa", TARGET, TABLE, heads=2)
        batch = Batch(jnp.asarray(TOKENS), jnp.asarray(LABELLED), jnp.asarray(SEGMENTS))
        at = (in_float64(drafter.init_params(None)), in_float64(TABLE))
        call = jax.jit(
            lambda *both: drafter.training.loss(*both, batch, jax.random.key(0), **weights)[0]
        )
        slopes, draw, step = jax.grad(call, argnums=(0, 1))(*at), np.random.default_rng(0), 1e-5
        for part in (0,) if weights.get("teacher") else (0, 1):
            way = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape)), at[part])
            moved = [
                jax.tree.map(lambda x, w, e=e: x + e * w, at[part], way) for e in (step, -step)
            ]
            ends = [call(*(each if i == part else at[i] for i in (0, 1))) for each in moved]
            slope = sum(
                jax.tree.leaves(jax.tree.map(lambda g, w: (g * w).sum(), slopes[part], way))
            )
            assert float(slope) == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=1e-6)
        assert float(jnp.abs(slopes[1]).max()) > 0


@pytest.mark.parametrize(
    "name", by_default(["total_variation", "lk", "lk_hybrid"], ["total_variation"])
)
def test_every_divergence_can_be_the_teacher(name):
    """One head: the mean of the divergence over its labels."""
    drafter = cases.random_heads("medusa", TARGET, TABLE, heads=1)
    params, batch = (
        drafter.init_params(None),
        Batch(*map(jnp.asarray, (TOKENS, LABELLED, SEGMENTS))),
    )
    heads = shared.heads_of("medusa", TARGET, params=params)
    texts = _heads.along(heads, TARGET, ModelParams(TABLE, params), batch, 1)
    _, logits, target_logits = next(texts)
    mask = _along_text.label(batch, 2)[1]
    value, metrics = drafter.training.loss(
        params, TABLE, batch, jax.random.key(0), ce=0.0, teacher=2.0, divergence=name
    )
    measure = objectives.DIVERGENCES[name]
    assert value == pytest.approx(2 * float(measure(target_logits, logits, mask)), rel=1e-5)
    uniform = measure(target_logits, jnp.zeros_like(logits), mask)
    assert metrics["uniform"] == pytest.approx(2 * float(uniform), rel=1e-5)


@pytest.mark.fast
def test_errors():
    drafter = cases.random_heads("medusa", TARGET, TABLE, heads=2)
    params, key = drafter.init_params(None), jax.random.key(0)

    def refused(match, tokens=TOKENS, **weights):
        with pytest.raises(UserError, match=match):
            drafter.training.loss(params, TABLE, Batch(jnp.asarray(tokens)), key, **weights)

    refused("loss.ce is -1; it must be a number >= 0", ce=-1)
    refused("loss.teacher is nan; it must be a number >= 0", teacher=float("nan"))
    refused("loss.ce and loss.teacher are both 0; make one of them positive", ce=0)
    refused("loss.slots is 'some'; it must be one of all, one", slots="some")
    refused("loss.divergence is 'kl'; it must be one of forward_kl, .*, lk_hybrid", divergence="kl")
    refused("loss.divergence is 'lk' and loss.teacher is 0", divergence="lk")
    refused("raise train.length to 2 or more", TOKENS[:, :2])


def test_random_places_have_a_label():
    """Depth 0 of place s is token s + 2; the last label of a document has a place too."""
    labelled = np.zeros((2, 13), bool)
    labelled[0, 4:] = True
    labelled[1, 9:] = True
    segments = np.ones((2, 13), np.int32)
    segments[0, 8:] = 2
    batch = Batch(jnp.zeros((2, 13), jnp.int32), jnp.asarray(labelled), jnp.asarray(segments))
    some = {2, 3, 4, 5, 8, 9, 10}, {7, 8, 9, 10}
    draw = jax.jit(lambda key: _along_text.random_places(key, batch, 2, 3, 9))
    seen = [set(), set()]
    for seed in range(20):
        for row, chosen in enumerate(np.asarray(draw(jax.random.key(seed))).tolist()):
            assert len(set(chosen)) == 9 and set(chosen[: len(some[row])]) == some[row]
            seen[row].add(tuple(chosen))
    assert min(map(len, seen)) > 10


def test_random_places_follow_the_depths_of_labels():
    """A label for depth 1 at token 9 belongs to the draft at place 6."""
    depths = np.full((1, 13), -1, np.int32)
    depths[0, 9], depths[0, 4] = 1, 0
    batch = Batch(jnp.zeros((1, 13), jnp.int32), depths=jnp.asarray(depths))
    draw = jax.jit(lambda key: _along_text.random_places(key, batch, 2, 2, 2))
    for seed in range(5):
        assert set(np.asarray(draw(jax.random.key(seed)))[0].tolist()) == {6, 2}


@pytest.mark.parametrize("name", ["medusa", "eagle", "block_head", "pass"])
def test_depths_are_computed_again_only_if_asked_or_large(name, monkeypatch):
    """``remat``, and logits of more than ``MOST`` bytes; otherwise the logits stay in memory."""
    target = lm.from_config(testing.tiny_config(layers=3))
    drafter = drafters.make(name, target)
    key = jax.eval_shape(lambda: jax.random.key(0))
    init = functools.partial(lm.init_params, testing.tiny_config(layers=3))
    theirs = jax.eval_shape(init, key)
    own = jax.eval_shape(drafter.training.start, theirs, key)
    batch = Batch(jax.ShapeDtypeStruct((2, 17), jnp.int32))
    more = {"steps": 2} if name == "eagle" else {}

    def again(**keys):
        loss = functools.partial(drafter.training.loss, **more, **keys)
        return "remat" in str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(own, theirs, batch, key))

    assert again(remat=True) and not again()
    monkeypatch.setattr(_depth_loss, "MOST", 1000)
    assert again()
