"""The attention of columns equals the dense layout with the same pattern, gradients included."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import network_cases as shared
import numpy as np
import pytest
from internals import heads_rollout as _rollout

from specjax import tree
from specjax.types import Batch

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, shared.VOCAB, (2, 10)))
SEGMENTS = jnp.asarray([[1] * 4 + [2] + [3] * 4 + [0], [1] * 10])


def dense(text: tree.Layout, step: int, places: None) -> tree.Layout:
    """``tree.columns`` as a mask over all tokens of the block."""
    rows, size = text.depth.shape
    own = jnp.broadcast_to(jnp.eye(size, dtype=bool), (rows, size, size))
    visible = jnp.concatenate([text.visible, *[own] * step], -1)
    return tree.Layout(visible, jnp.concatenate([text.depth + i for i in range(step + 1)], -1))


@pytest.mark.parametrize(
    ("segments", "shape"),
    [
        (SEGMENTS, {}),
        pytest.param(None, {"taps": (0, 1), "layers": 2}, marks=pytest.mark.slow),
    ],
)
def test_columns_are_the_dense_mask(segments, shape):
    """Grouped heads, three steps; parameters and features have gradients."""
    network = shared.network(**shape)
    params, text = shared.random_params(network), _rollout.text(Batch(TOKENS, None, segments))
    features = jax.random.normal(jax.random.key(0), (2, 9, shared.WIDTH))
    weights = jax.random.normal(jax.random.key(1), (3, 2, 9, shared.WIDTH))

    def value(draft, features):
        before, total, pair = (), 0.0, params._replace(draft=draft)
        for j in range(3):
            fed, own = _rollout.step(network, text, j, pair, features, before)
            features, before = fed.feature, (*before, own)
            total += (weights[j] * fed.hidden).sum()
        return total

    def run():
        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(params.draft, features)

    result = run()
    with mock.patch.object(tree, "columns", dense):
        expected = run()
    assert abs(float(expected[0])) > 1
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), result, expected
    )


def test_no_array_has_the_size_of_the_dense_mask():
    """The largest array of a late step has T x T scores per head, not T x 4T."""
    network, size = shared.network(), 64
    params, steps = shared.random_params(network), 4
    text = _rollout.text(Batch(jnp.zeros((1, size + 1), jnp.int32)))

    def last(params, features):
        before = ()
        for j in range(steps):
            fed, own = _rollout.step(network, text, j, params, features, before)
            features, before = fed.feature, (*before, own)
        return features

    jaxpr = jax.make_jaxpr(last)(params, jnp.zeros((1, size, shared.WIDTH)))
    largest = max(
        var.aval.size for equation in jaxpr.eqns for var in equation.outvars if var.aval.size
    )
    assert largest == 4 * size * size  # four heads
