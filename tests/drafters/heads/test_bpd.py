"""Blockwise parallel decoding: the slots' formula, the random slot of a batch, training as decoding, the mistakes."""

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


def test_forward_is_the_card():
    """h + W2 relu(W1 h + b1) + b2 of each slot, then the target's own LM head."""
    model, target_params = testing.tiny(layers=1, width=16)
    params = cases.random_heads(
        "bpd", model, target_params, scale=0.5, heads=2, inner=6
    ).init_params(None)
    p, tokens = jax.tree.map(lambda x: np.asarray(x, np.float64), params), shared.text(vocab=32)
    head = np.asarray(model.unembed(target_params, jnp.eye(16)), np.float64)

    def read(feature, known):
        i = len(known) - 1
        inside = np.maximum(feature @ p["up"]["kernel"][i] + p["up"]["bias"][i], 0)
        return (feature + inside @ p["down"]["kernel"][i] + p["down"]["bias"][i]) @ head

    got = shared.logits_along("bpd", model, target_params, params, tokens)
    want = shared.retold(read, shared.features_of(model, target_params, tokens), tokens, 2)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.fast
def test_new_slots_repeat_the_target():
    fresh = drafters.make("bpd", TARGET, heads=2).training.start(TABLE, jax.random.key(0))
    assert fresh["up"]["kernel"].shape == (2, shared.VOCAB, 4 * shared.VOCAB)
    tokens = shared.text()
    got = shared.logits_along("bpd", TARGET, TABLE, fresh, tokens)
    np.testing.assert_array_equal(
        got[:, :, 0], shared.features_of(TARGET, TABLE, tokens).astype(np.float32)
    )


def test_one_slot_a_batch_is_all_of_them_on_average():
    """Each draw is one depth's term, decay and all; all are drawn alike; their mean and its gradient are those of the sum."""
    drafter = cases.random_heads("bpd", TARGET, TABLE, heads=3, inner=4)
    params, batch = drafter.init_params(None), Batch(jnp.asarray(shared.text(2, 8)))
    weights = {"ce": 0.6, "teacher": 0.5, "decay": 0.7}

    @jax.jit
    @jax.vmap
    def one(key):
        loss = lambda p: drafter.training.loss(p, TABLE, batch, key, slots="one", **weights)[0]  # noqa: E731
        return jax.value_and_grad(loss)(params)

    values, slopes = one(jax.random.split(jax.random.key(0), 300))
    whole = lambda p: drafter.training.loss(p, TABLE, batch, jax.random.key(0), **weights)[0]  # noqa: E731
    value, slope = jax.value_and_grad(whole)(params)
    seen, first, count = np.unique(
        np.asarray(values).round(5), return_index=True, return_counts=True
    )
    assert len(seen) == 3 and (count > 70).all()  # 100 +- 8 each
    assert values[first].mean() * 3 == pytest.approx(float(value), rel=1e-5)
    for each, all_of_them in zip(jax.tree.leaves(slopes), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(each[first].sum(0), all_of_them, rtol=1e-4, atol=1e-6)


def test_training_sees_what_decoding_does():
    drafter = cases.random_heads("bpd", TARGET, TABLE, heads=3, tree="3x2x1")
    shared.assert_foreseen_is_decoded(drafter, TARGET, TABLE, shared.PROMPTS * 300, 24)


def test_it_learns_and_a_wrong_label_is_noticed():
    shared.assert_learns("bpd", heads=3)


@pytest.mark.fast
def test_mistakes(tmp_path):
    mine = cases.random_heads("bpd", TARGET, TABLE, heads=3, inner=4).init_params(None)

    def refused(match, **keys):
        with pytest.raises(UserError, match=match):
            drafters.make("bpd", TARGET, **keys).init_params(None)

    refused("bpd has no heads yet; give model=, a directory of trained ones")
    refused(
        "the tree is 4 levels deep and bpd has 3 heads; take a flatter one",
        params=mine,
        tree="2x1x1x1",
    )
    refused("heads is 2, and the heads in the files have 3; leave it out", params=mine, heads=2)
    refused("inner is 5, and the heads in the files have 4; leave it out", params=mine, inner=5)
    refused("inner is -2; it must be a whole number >= 0", inner=-2)
    shared.assert_foreign_is_refused("bpd", TARGET, mine)
    shared.assert_files_round_trip("bpd", tmp_path / "heads", heads=2)
