"""The losses of EAGLE-1, HASS and EAGLE-3 against NumPy; noise, gradients, parts, errors."""

from __future__ import annotations

import functools

import head_cases
import jax
import jax.numpy as jnp
import network_cases as shared
import numpy as np
import pytest
from internals import heads_along_text as _along_text
from internals import heads_rollout as _rollout
from marks import by_default

from specjax.errors import UserError
from specjax.train import update
from specjax.types import Batch, Features

TOKENS = shared.TOKENS
LABELLED = np.random.default_rng(5).random(TOKENS.shape) < 0.7
SEGMENTS = np.array([[1] * 6 + [2] * 6 + [0] * 2, [1] * 14])
KEY = jax.random.key(3)


def batch_of(packed: bool) -> Batch:
    arrays = (TOKENS, LABELLED & (SEGMENTS > 0), SEGMENTS) if packed else (TOKENS,)
    return Batch(*(jnp.asarray(x) for x in arrays))


def loss_of(network, **keys):
    """The loss as a function (draft params, target params, batch, key) of the target with taps."""
    return functools.partial(_rollout.loss, network, shared.tapped(network), **keys)


def target_of(network, params, batch):
    return jax.jit(lambda target: _along_text.output(shared.tapped(network), target, batch))(
        params.target
    )


def features_along(network, params, batch, steps):
    """[steps,B,T,D]: ``Fed.feature``."""

    @jax.jit
    def run(params, features):
        before, result, text = (), [], _rollout.text(batch)
        for j in range(steps):
            fed, own = _rollout.step(network, text, j, params, features, before)
            features, before = fed.feature, (*before, own)
            result.append(features)
        return jnp.stack(result)

    return run(params, network.read(params, target_of(network, params, batch)))


def plain_loss(
    network, params, batch, *, steps, decay, feature, weight, top_k_weight, ce=0.0, places=0, **_
):
    """The sums over all labels, in loops; (loss, agreement, alpha) of each depth."""
    key, most = jax.random.split(KEY)[0], places or TOKENS.shape[1] - 1
    columns = np.asarray(_along_text.random_places(key, batch, 2, steps, most))
    logits, out = shared.logits_along(network, params, batch), target_of(network, params, batch)
    recycled = np.asarray(features_along(network, params, batch, steps), np.float64)
    hidden, whole = np.asarray(out.hidden, np.float64), np.asarray(out.logits, np.float64)
    ids = np.arange(shared.VOCAB) if network.ids is None else network.ids
    rows, size = TOKENS.shape[0], TOKENS.shape[1] - 1
    labelled = np.ones_like(LABELLED) if batch.labelled is None else np.asarray(batch.labelled)
    segments = np.ones_like(TOKENS) if batch.segments is None else np.asarray(batch.segments)
    total, agreed, alpha, count = (np.zeros(steps) for _ in range(4))
    for b, t, j in np.ndindex(rows, size, steps):
        at = t + j + 1
        if at >= size or not labelled[b, at + 1] or segments[b, at + 1] != segments[b, t]:
            continue
        if t not in columns[b]:
            continue
        q, p = head_cases.softmax(logits[b, t, j]), head_cases.softmax(whole[b, at])
        inside = p[ids] / p[ids].sum()
        count[j] += 1
        alpha[j] += np.minimum(p[ids], q).sum()
        agreed[j] += ids[q.argmax()] == p.argmax()
        far = np.abs(recycled[j, b, t] - hidden[b, at])
        total[j] += feature * np.where(far < 1, far**2 / 2, far - 0.5).mean()
        if TOKENS[b, at + 1] in ids:
            total[j] -= ce * np.log(q[list(ids).index(TOKENS[b, at + 1])])
        if p.argmax() in ids:
            best = np.argsort(-inside, kind="stable")[:10]
            total[j] += weight * (inside * np.log(inside / q)).sum()
            total[j] -= top_k_weight * (inside[best] * np.log(q[best])).sum()
    value = (decay ** np.arange(steps) * total).sum() / count[0]
    return value, agreed / count, alpha / count, count


METHODS = {
    "eagle": ("eagle", _rollout.EAGLE),
    "hass": ("eagle", _rollout.HASS),
    "eagle3": ("eagle3, 2 layers", _rollout.EAGLE3 | {"steps": 3, "ce": 0.3}),
}


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("name", "places"),
    by_default(
        [("eagle", 0), ("hass", 0), ("eagle3", 0), ("hass", 5), ("eagle3", 5)],
        [("hass", 0), ("eagle3", 5)],
    ),
)
def test_loss_by_hand(name, places, packed):
    """Of all columns, and of some."""
    shape, keys = METHODS[name]
    network, batch = shared.network(**shared.SHAPES[shape]), batch_of(packed)
    params = shared.random_params(network)
    keys = {"decay": 1.0, "top_k_weight": 0.0, **keys, "noise": 0.0, "places": places}
    loss = jax.jit(loss_of(network, **keys))
    value, metrics = loss(params.draft, params.target, batch, KEY)
    expected, agreed, alpha, count = plain_loss(network, params, batch, **keys)
    assert value == pytest.approx(expected, rel=1e-4)
    steps = range(1, keys["steps"] + 1)
    assert [metrics[f"agreement_{d}"] for d in steps] == pytest.approx(agreed.tolist())
    assert [metrics[f"alpha_{d}"] for d in steps] == pytest.approx(alpha.tolist(), rel=1e-4)
    weights = metrics["weight"]
    assert weights["loss"] == weights["scale"] == weights["uniform"] == count[0]
    for d in steps:
        assert weights[f"agreement_{d}"] == weights[f"alpha_{d}"] == count[d - 1]
    assert float(metrics["uniform"]) > 0 and float(metrics["scale"]) > 0


def test_positions_outside_the_draft_vocabulary_may_count():
    network, batch = shared.network(taps=(0,), ids=shared.IDS), batch_of(False)
    params = shared.random_params(network)
    keys = _rollout.EAGLE3 | {"steps": 1}
    values = [
        jax.jit(loss_of(network, **keys, in_vocabulary=flag))(
            params.draft, params.target, batch, KEY
        )
        for flag in (True, False)
    ]
    best = np.asarray(target_of(network, params, batch).logits).argmax(-1)[:, 1:]
    assert 0 < np.isin(best, shared.IDS).sum() < best.size
    assert values[0][0] < values[1][0]
    share = values[0][1]["scale"] / values[1][1]["scale"]
    assert share == pytest.approx(np.isin(best, shared.IDS).mean())


def test_the_uniform_guess_has_the_feature_zero():
    """Parameters of zeros but for a head: EAGLE-1 then recycles zeros and draws uniformly."""
    network, batch = shared.network(), batch_of(True)
    params = shared.random_params(network)
    zeros = jax.tree.map(jnp.zeros_like, params.draft)
    loss = jax.jit(loss_of(network, **_rollout.HASS))
    value, metrics = loss(zeros, params.target, batch, KEY)
    assert value == pytest.approx(float(metrics["uniform"]), rel=1e-5)


def test_noise_is_on_the_inputs_only():
    """The error of a network that copies its input shows the noise; the labels have none."""
    network, batch = shared.network(), batch_of(False)
    params, target = shared.random_params(network), shared.target()[1]
    # Only fc is not 0: each residual branch ends in a kernel.
    fresh = jax.tree.map(jnp.zeros_like, params.draft)
    fresh["fc"]["kernel"] = fresh["fc"]["kernel"].at[shared.WIDTH :].set(jnp.eye(shared.WIDTH))
    keys = {"steps": 1, "feature": 1.0, "weight": 0.0}
    hidden = target_of(network, params, batch).hidden
    noise = jax.random.uniform(jax.random.fold_in(KEY, 0), hidden.shape, minval=-0.3, maxval=0.3)
    value, _ = jax.jit(loss_of(network, **keys, noise=0.3))(fresh, target, batch, KEY)
    far = np.abs((hidden + noise)[:, :-1] - hidden[:, 1:])
    assert value == pytest.approx(np.where(far < 1, far**2 / 2, far - 0.5).mean(), rel=1e-4)
    far = np.abs(hidden[:, :-1] - hidden[:, 1:])
    assert abs(value - np.where(far < 1, far**2 / 2, far - 0.5).mean()) > 1e-3


@pytest.mark.parametrize("detach", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_detached_features_have_no_gradient(detach):
    """HASS: step 2 trains the parameters as if the feature of step 1 were given."""
    network, batch = shared.network(), batch_of(False)
    params = shared.random_params(network)
    keys = {"feature": 1.0, "weight": 0.0, "noise": 0.0, "detach": detach}
    given, text = features_along(network, params, batch, 1)[0], _rollout.text(batch)
    out = target_of(network, params, batch)
    counted = _along_text.label(batch, 3)[1]
    first = _along_text.label(batch, 2)[1].sum()

    def whole(draft, steps):
        own = keys | {"detach": detach and steps > 1}
        return loss_of(network, **own, steps=steps)(draft, params.target, batch, KEY)[0]

    def second(draft):
        pair = params._replace(draft=draft)
        _, own = _rollout.step(network, text, 0, pair, network.read(pair, out), ())
        fed, _ = _rollout.step(network, text, 1, pair, given, (own,))
        far = jnp.abs(fed.feature - _along_text.ahead(out.hidden, 2, out.hidden.shape[1]))
        values = jnp.where(far < 1, far**2 / 2, far - 0.5).mean(-1)
        return jnp.where(counted, values, 0).sum() / first

    @jax.jit
    def difference(draft):
        both, one = (jax.grad(whole)(draft, steps) for steps in (2, 1))
        own = jax.tree.map(jnp.subtract, both, one)
        return jax.tree.map(jnp.subtract, own, jax.grad(second)(draft)), own

    wrong, own = difference(params.draft)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(own))
    error = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wrong))
    assert error < 1e-5 * largest if detach else error > 0.05 * largest


@pytest.mark.parametrize(
    "shape", ["eagle", pytest.param("eagle3, 2 layers", marks=pytest.mark.slow)]
)
def test_parts_and_padding_change_nothing(shape):
    """The gradient of a batch is that of its parts; rows may be longer."""
    network, batch = shared.network(**shared.SHAPES[shape]), batch_of(True)
    params = shared.random_params(network)
    own = {"feature": 0.0 if network.shape.taps else 1.0, "noise": 0.0}
    loss = loss_of(network, steps=1 if shape == "eagle" else 2, **own)
    results = [
        jax.jit(make(loss))(params.draft, params.target, batch, KEY)
        for make in (update._gradient, lambda loss: update._in_parts(loss, 2))
    ]
    longer = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 3))), batch)
    results.append(jax.jit(update._gradient(loss))(params.draft, params.target, longer, KEY))
    for grads, metrics in results[1:]:
        assert metrics["loss"] == pytest.approx(float(results[0][1]["loss"]), rel=1e-5)
        for name in ("scale", *(name for name in metrics if name[-1].isdigit())):
            assert metrics[name] == pytest.approx(float(results[0][1][name]), rel=1e-5), name
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5),
            grads,
            results[0][0],
        )


@pytest.mark.parametrize("name", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3.1"])
def test_stored_features_are_those_of_the_target(name):
    """In float32 to the same bits; in bfloat16 nearly."""
    network, batch = shared.network(**shared.SHAPES[name]), batch_of(True)
    params = shared.random_params(network)
    loss = jax.jit(loss_of(network, steps=2, feature=0.0, noise=0.1))
    out = target_of(network, params, batch)
    values = [loss(params.draft, params.target, batch, KEY)[0]]
    for dtype in (jnp.float32, jnp.bfloat16):
        hidden, taps = jax.tree.map(lambda x, d=dtype: x.astype(d), (out.hidden, out.taps))
        stored = batch.replace(features=Features(hidden, taps))
        values.append(loss(params.draft, params.target, stored, KEY)[0])
    assert values[1] == pytest.approx(float(values[0]), rel=1e-5)
    assert values[2] == pytest.approx(float(values[0]), rel=0.05) and values[2] != values[1]


@pytest.mark.fast
def test_errors():
    eagle, eagle3 = shared.network(), shared.network(taps=(0,), ids=shared.IDS)
    params = shared.random_params(eagle)

    def refused(match, network=eagle, tokens=TOKENS, **keys):
        with pytest.raises(UserError, match=match):
            loss_of(network, **keys)(params.draft, params.target, Batch(jnp.asarray(tokens)), KEY)

    refused("loss.steps is 0; it must be a whole number >= 1", steps=0)
    refused("loss.noise is -1; it must be a number >= 0", noise=-1)
    refused("loss.detach is 1; it must be True or False", detach=1)
    refused("loss.divergence is 'js'; it must be one of forward_kl", divergence="js")
    refused("loss.top_k_weight are all 0; make one of them positive", feature=0, weight=0)
    refused("loss.top_k is 5 and loss.top_k_weight is 0", top_k=5)
    refused("loss.divergence is 'lk' and loss.weight is 0", divergence="lk", weight=0)
    refused("eagle3 does not predict the target's features; leave it 0", eagle3, feature=1.0)
    wide = {"feature": 0.0, "top_k": 13, "top_k_weight": 1.0}
    refused("loss.top_k is 13 and the draft vocabulary has 12 tokens", eagle3, **wide)
    short = "predicts 5 tokens ahead; raise train.length to 5 or more, or lower loss.steps"
    refused(short, tokens=TOKENS[:, :5], steps=4)
