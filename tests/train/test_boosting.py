"""Boost-tuning: the labels that are left, and a run on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import small_config

from specjax import testing
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.train import objectives, recipes
from specjax.types import Batch


def models():
    """A target, two earlier draft models, and the one that is trained, with their parameters."""
    return [testing.tiny("llama", seed, layers=1) for seed in range(4)]


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_loss_has_the_labels_that_no_model_predicts(packed):
    (target, theirs), *earlier, (draft, params) = models()
    random = np.random.default_rng(0)
    tokens = random.integers(0, 32, (3, 17))
    # Half of the labels are what the first earlier model predicts.
    guess = np.asarray(lm.forward(earlier[0][0], earlier[0][1], jnp.asarray(tokens[:, :-1])).logits)
    tokens[:, -1] = guess[:, -1].argmax(-1)
    segments = jnp.asarray(np.arange(17) // 6 + np.zeros((3, 1), int)) if packed else None
    labelled = jnp.asarray(random.random((3, 17)) < 0.8) if packed else None
    batch = Batch(jnp.asarray(tokens), labelled, segments)
    known = np.zeros((3, 16), bool)
    for model, own in earlier:
        part = None if segments is None else segments[:, :-1]
        logits = lm.forward(model, own, batch.tokens[:, :-1], part).logits
        known |= np.asarray(logits).argmax(-1) == tokens[:, 1:]
    assert known.any()
    left = np.ones((3, 17), bool) if labelled is None else np.asarray(labelled).copy()
    left[:, 1:] &= ~known
    plain = objectives.distill_loss(target, draft)
    own = objectives.boosted(plain, [model for model, _ in earlier])
    both = {"target": theirs, "earlier": [each for _, each in earlier]}
    key = jax.random.key(0)
    value, metrics = own(params, both, batch, key)
    expected, right = plain(params, theirs, batch.replace(labelled=jnp.asarray(left)), key)
    np.testing.assert_array_equal(value, expected)
    assert float(metrics["weight"]["loss"]) == float(right["weight"])
    before = left[:, 1:].sum() + (known & np.asarray(labelled)[:, 1:] if packed else known).sum()
    np.testing.assert_allclose(metrics["missed"], left[:, 1:].sum() / before, rtol=1e-6)
    assert float(metrics["weight"]["missed"]) == before  # a share of all labels


@pytest.mark.slow
def test_a_boosted_run(target_run, text_file, tmp_path):
    """The second model is trained on other labels than the first; it has fewer of them."""
    keys = {"target": str(target_run[0]), "data__files": text_file, "model__hidden_size": 16}
    recipes.run(small_config("distill", **keys), tmp_path / "first")
    first = hf.load(tmp_path / "first")
    config = small_config("distill", boosted=str(tmp_path / "first"), **keys)
    recipes.run(config, tmp_path / "second")
    second = hf.load(tmp_path / "second")
    equal = jax.tree.map(np.array_equal, first.params, second.params)
    assert not all(jax.tree.leaves(equal))


def test_another_vocabulary_is_refused(target_run, text_file, tmp_path):
    hf.save(tmp_path / "other", testing.tiny_config(vocab_size=40), testing.tiny(vocab_size=40)[1])
    config = small_config(
        "distill",
        target=str(target_run[0]),
        data__files=text_file,
        boosted=str(tmp_path / "other"),
    )
    with pytest.raises(UserError, match="the draft model has a vocabulary of 40"):
        recipes.run(config, tmp_path / "run")
