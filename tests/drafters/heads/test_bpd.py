"""Blockwise parallel decoding: the formula of a slot, random slots, forecasts, errors."""

from __future__ import annotations

import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, testing
from specjax.errors import UserError
from specjax.testing import cases
from specjax.types import Batch

TARGET, TABLE = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)


def test_forward_is_the_formula():
    """h + W2 relu(W1 h + b1) + b2 of each slot, then the target's own LM head."""
    model, target_params = testing.tiny(layers=1, width=16)
    drafter = cases.random_heads("bpd", model, target_params, scale=0.5, heads=2, inner=6)
    params = drafter.init_params(None)
    p, tokens = jax.tree.map(lambda x: np.asarray(x, np.float64), params), shared.text(vocab=32)
    head = np.asarray(model.unembed(target_params, jnp.eye(16)), np.float64)

    def read(feature, since):
        i = len(since) - 1
        inside = np.maximum(feature @ p["up"]["kernel"][i] + p["up"]["bias"][i], 0)
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


@pytest.mark.slow
def test_forecast_is_decoded():
    drafter = cases.random_heads("bpd", TARGET, TABLE, heads=3, tree="3x2x1")
    shared.assert_forecast_is_decoded(drafter, TARGET, TABLE, shared.PROMPTS * 300, 24)


def test_it_learns_and_not_from_wrong_labels():
    shared.assert_learns("bpd", heads=3)


@pytest.mark.fast
def test_errors(tmp_path):
    params = cases.random_heads("bpd", TARGET, TABLE, heads=3, inner=4).init_params(None)

    def refused(match, **keys):
        with pytest.raises(UserError, match=match):
            drafters.make("bpd", TARGET, **keys).init_params(None)

    refused("bpd has no heads yet; give model=, a directory of trained ones")
    refused(
        "the tree is 4 levels deep and bpd drafts at most 3 tokens ahead; take a flatter one",
        params=params,
        tree="2x1x1x1",
    )
    refused("heads is 2, and the given heads have 3; leave it out", params=params, heads=2)
    refused("inner is 5, and the given heads have 4; leave it out", params=params, inner=5)
    refused("inner is -2; it must be a whole number >= 0", inner=-2)
    shared.assert_foreign_is_refused("bpd", TARGET, params)
    shared.assert_files_round_trip("bpd", tmp_path / "heads", heads=2)
