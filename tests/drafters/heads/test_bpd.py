"""Blockwise parallel decoding: the formula of a slot, random slots, forecasts, errors."""

from __future__ import annotations

import cases
import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import drafters, testing
from specjax.errors import UserError
from specjax.types import Batch, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "bpd": ("bpd", {"heads": 2}, ("match",)),
}

TARGET, TABLE = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)


@pytest.mark.parametrize("layer", ["separate", "joint"])
def test_forward_is_the_formula(layer):
    """h + W2 relu(W1 h + b1) + b2 of each slot, then the target's own LM head.

    A joint layer has the hidden units of all slots.
    """
    model, target_params = testing.tiny(layers=1, width=16)
    keys = {"heads": 2, "inner": 6, "layer": layer}
    drafter = cases.random_heads("bpd", model, target_params, scale=0.5, **keys)
    params = drafter.init_params(None)
    p, tokens = jax.tree.map(lambda x: np.asarray(x, np.float64), params), shared.text(vocab=32)
    head = np.asarray(model.unembed(target_params, jnp.eye(16)), np.float64)

    def read(feature, since):
        i = len(since) - 1
        slots = (i,) if layer == "separate" else range(2)
        inside = [feature @ p["up"]["kernel"][j] + p["up"]["bias"][j] for j in slots]
        inside = np.maximum(np.concatenate(inside, -1), 0)
        return (feature + inside @ p["down"]["kernel"][i] + p["down"]["bias"][i]) @ head

    result = shared.logits_along("bpd", model, target_params, params, tokens)
    features = shared.features_of(model, target_params, tokens)
    expected = shared.expected_along(read, features, tokens, 2)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.fast
def test_new_slots_repeat_the_target():
    fresh = drafters.make("bpd", TARGET, heads=2).training.start(TABLE, jax.random.key(0))
    assert fresh["up"]["kernel"].shape == (2, shared.VOCAB, 4 * shared.VOCAB)
    tokens = shared.text()
    result = shared.logits_along("bpd", TARGET, TABLE, fresh, tokens)
    features = shared.features_of(TARGET, TABLE, tokens).astype(np.float32)
    np.testing.assert_array_equal(result[:, :, 0], features)


def test_one_slot_per_batch_is_the_mean_of_all():
    """Each draw is one depth's term with its decay, and each depth is drawn equally often.

    The mean of the terms and of their gradients are those of the sum.
    """
    drafter = cases.random_heads("bpd", TARGET, TABLE, heads=3, inner=4)
    params, batch = drafter.init_params(None), Batch(jnp.asarray(shared.text(2, 8)))
    weights = {"ce": 0.6, "teacher": 0.5, "decay": 0.7}

    def loss(params, key, slots):
        return drafter.training.loss(params, TABLE, batch, key, slots=slots, **weights)[0]

    draw = jax.jit(jax.vmap(lambda key: jax.value_and_grad(loss)(params, key, "one")))
    values, slopes = draw(jax.random.split(jax.random.key(0), 300))
    whole = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    value, slope = whole(params, jax.random.key(0), "all")
    distinct, first, count = np.unique(
        np.asarray(values).round(5), return_index=True, return_counts=True
    )
    assert len(distinct) == 3 and (count > 70).all()  # 100 +- 8 each
    assert values[first].mean() * 3 == pytest.approx(float(value), rel=1e-5)
    for each, all_of_them in zip(jax.tree.leaves(slopes), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(each[first].sum(0), all_of_them, rtol=1e-4, atol=1e-6)


@pytest.mark.fast
def test_a_joint_layer_without_units_of_other_slots_is_separate_layers():
    params = cases.random_heads("bpd", TARGET, TABLE, heads=3, inner=4).init_params(None)
    down, width = np.asarray(params["down"]["kernel"]), shared.VOCAB
    kernel = np.zeros((3, 3, 4, width), np.float32)
    kernel[range(3), range(3)] = down
    joint = {**params, "down": {**params["down"], "kernel": kernel.reshape(3, 12, width)}}
    tokens = shared.text()
    first, second = (
        shared.logits_along("bpd", TARGET, TABLE, own, tokens) for own in (params, joint)
    )
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)
    # Drafts take all slots in one pass.
    noise = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(1), x.shape), joint)
    family, both = shared.heads_of("bpd", TARGET, params=noise), ModelParams(TABLE, noise)
    feature = jax.random.normal(jax.random.key(2), (5, width))
    every = family.every(both, feature)
    for depth in range(3):
        one, _ = family.step(both, feature, depth, jnp.zeros(5, jnp.int32))
        np.testing.assert_allclose(every[depth], one, rtol=1e-5, atol=1e-5)
    fresh = drafters.make("bpd", TARGET, heads=3, inner=4, layer="joint").training
    new = fresh.start(TABLE, jax.random.key(0))
    assert new["down"]["kernel"].shape == (3, 12, width)
    with pytest.raises(UserError, match="layer is 'separate', and the given bpd has 'joint'"):
        drafters.make("bpd", TARGET, params=joint, layer="separate")


@pytest.mark.slow
def test_forecast_is_decoded():
    drafter = cases.random_heads("bpd", TARGET, TABLE, heads=3, tree="3x2x1")
    shared.assert_forecast_is_decoded(drafter, TARGET, TABLE, shared.PROMPTS * 300, 24)


@pytest.mark.parametrize("layer", by_default(["joint", "separate"], ["joint"]))
def test_it_learns_and_not_from_wrong_labels(layer):
    shared.assert_learns("bpd", heads=3, layer=layer)


@pytest.mark.fast
def test_errors(tmp_path):
    params = cases.random_heads("bpd", TARGET, TABLE, heads=3, inner=4).init_params(None)

    def refused(match, **keys):
        with pytest.raises(UserError, match=match):
            drafters.make("bpd", TARGET, **keys).init_params(None)

    refused("bpd has no parameters yet; give model=, a directory of trained ones")
    refused(
        "the tree is 4 levels deep and bpd drafts at most 3 tokens ahead; take a flatter one",
        params=params,
        tree="2x1x1x1",
    )
    refused("heads is 2, and the given bpd has 3; leave it out", params=params, heads=2)
    refused("inner is 5, and the given bpd has 4; leave it out", params=params, inner=5)
    refused("inner is -2; it must be a whole number >= 0", inner=-2)
    refused("layer is 'all'; it must be one of separate, joint", layer="all")
    shared.assert_foreign_is_refused("bpd", TARGET, params)
    shared.assert_files_round_trip("bpd", tmp_path / "heads", heads=2)
    shared.assert_files_round_trip("bpd", tmp_path / "joint", heads=2, layer="joint")
