"""Hydra: the formula of a head, forecasts, errors. The prefix layer is in test_hydra_prefix."""

from __future__ import annotations

import cases
import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import rms_normal
from marks import by_default

from specjax import drafters, testing
from specjax.errors import UserError
from specjax.types import Batch

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "hydra": (
        "hydra",
        {"heads": 2, "layers": 2, "tree": "2x1", "siblings": "without_replacement"},
        ("recursive",),
    ),
}

TARGET, TABLE = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)


@pytest.mark.fast
@pytest.mark.parametrize("layers", [1, 3])
def test_forward_is_the_formula(layers):
    params = cases.random_heads("hydra", TARGET, TABLE, heads=3, layers=layers).init_params(None)
    tokens = shared.text()
    result = shared.logits_along("hydra", TARGET, TABLE, params, tokens)
    read = shared.hydra_formula(params, np.eye(shared.VOCAB))
    features = shared.features_of(TARGET, TABLE, tokens)
    expected = shared.expected_along(read, features, tokens, 3)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize("prefix", [False, True])
def test_new_heads_repeat_the_target(prefix):
    """Hydra++ does too, after its norm has removed the length of the feature."""
    model, params = testing.tiny(layers=1, width=16)
    drafter = drafters.make("hydra", model, heads=2, layers=3, prefix=prefix)
    fresh, facts = drafter.training.start(params, jax.random.key(0)), dict(drafter.training.facts)
    tokens, head_dim = shared.text(vocab=32), facts.get("head_dim", 0)
    result = shared.logits_along("hydra", model, params, fresh, tokens, head_dim=head_dim)
    features = shared.features_of(model, params, tokens)
    features = jnp.asarray(rms_normal(features) if prefix else features, jnp.float32)
    expected = np.repeat(np.asarray(model.unembed(params, features))[:, :, None], 2, 2)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


CHAIN, TREE, PREFIX = {}, {"tree": "3x2x1"}, {"siblings": "iid", "prefix": True, "head_dim": 2}


@pytest.mark.parametrize("shape", by_default((CHAIN, TREE, PREFIX), ()))
def test_forecast_is_decoded(shape):
    drafter = cases.random_heads("hydra", TARGET, TABLE, heads=3, **shape)
    shared.assert_forecast_is_decoded(drafter, TARGET, TABLE, shared.PROMPTS * 300, 24)


@pytest.mark.parametrize("prefix", [False, True])
def test_it_learns_and_not_from_wrong_labels(prefix):
    shared.assert_learns("hydra", heads=3, layers=1, prefix=prefix)


@pytest.mark.fast
def test_errors():
    params = cases.random_heads("hydra", TARGET, TABLE, heads=3).init_params(None)

    def refused(match, **keys):
        with pytest.raises(UserError, match=match):
            drafters.make("hydra", TARGET, **keys).init_params(None)

    refused("hydra has no parameters yet; give model=, a directory of trained ones")
    refused(
        "the tree is 4 levels deep and hydra drafts at most 3 tokens ahead; take a flatter one",
        params=params,
        tree="2x1x1x1",
    )
    refused("heads is 2, and the given hydra has 3; leave it out", params=params, heads=2)
    refused("layers is 2, and the given hydra has 1; leave it out", params=params, layers=2)
    refused("prefix is 1; it must be True or False", prefix=1)
    refused("head_dim is 2 and has no effect without a prefix layer; leave it out, or", head_dim=2)
    shared.assert_foreign_is_refused("hydra", TARGET, params)
    drafter = drafters.make("hydra", TARGET, params=params)
    message = "each head of hydra continues from the head before it; loss.slots must be 'all'"
    with pytest.raises(UserError, match=message):
        batch = Batch(jnp.asarray(shared.text()))
        drafter.training.loss(params, TABLE, batch, jax.random.key(0), slots="one")
