"""Sampling: the maps against a float64 reference, their properties, and the draws."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import sampling, testing
from specjax.errors import UserError
from specjax.rng import DRAFT, RowKeys, row_keys

pytestmark = pytest.mark.fast
V = 7
to_probs = jax.jit(sampling.to_probs)
# Rounding makes ties likely.
logit = st.floats(-8, 8, width=32).map(lambda x: round(x, 2))
logits = st.lists(logit, min_size=V, max_size=V)
knobs = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
        "top_k": st.integers(0, V + 2),
        "top_p": st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    }
)


def reference(z, temperature, top_k, top_p, min_p):
    """The same map, in float64, one token at a time."""
    z = np.asarray(z, np.float64)
    if temperature == 0:
        return np.eye(len(z))[np.argmax(z)]
    z = (z - z.max()) / temperature
    kept = np.ones(len(z), bool)
    if top_k:
        kept &= z >= np.sort(z)[::-1][min(top_k, len(z)) - 1]
    if top_p < 1:
        mass = np.where(kept, np.exp(z), 0)
        mass /= mass.sum()
        kept &= np.array([mass[z > z[i]].sum() < top_p for i in range(len(z))])
    kept &= np.exp(z) >= min_p
    probs = np.where(kept, np.exp(z), 0)
    return probs / probs.sum()


def near_boundary(z, k):
    """Whether a cumulated mass is within rounding of top_p, or a ratio within that of min_p."""
    z = np.asarray(z, np.float64)
    mass = reference(z, k["temperature"], k["top_k"], 1.0, 0.0)
    sums = [mass[z > v].sum() for v in z]
    ratios = np.exp((z - z.max()) / max(k["temperature"], 1e-9))
    return min(abs(s - k["top_p"]) for s in sums) < 1e-5 or min(abs(ratios - k["min_p"])) < 1e-5


@settings(max_examples=300, deadline=None)
@given(logits, knobs)
def test_equals_the_reference(z, k):
    probs = to_probs(jnp.asarray([[z]], jnp.float32), sampling.make_sampling(1, **k))
    probs = np.asarray(probs)[0, 0]
    assert probs.dtype == np.float32 and abs(probs.sum() - 1) < 1e-5
    if k["temperature"] == 0 or not near_boundary(z, k):
        expected = reference(z, **k)
        np.testing.assert_allclose(probs, expected, atol=2e-6)
        # Excluded tokens are exactly 0. The others are not, unless too small for float32.
        assert (probs[expected == 0] == 0).all() and (probs[expected > 1e-30] > 0).all()


@settings(max_examples=100, deadline=None)
@given(logits, knobs, st.permutations(range(V)))
def test_a_permutation_of_the_vocabulary_permutes_the_probs(z, k, order):
    if k["temperature"] == 0 or near_boundary(z, k):
        return
    z = np.asarray(z, np.float32)
    both = jnp.asarray([[z], [z[list(order)]]])
    probs = np.asarray(to_probs(both, sampling.make_sampling(2, **k)))
    np.testing.assert_allclose(probs[0, 0][list(order)], probs[1, 0], atol=2e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(logits, knobs), min_size=3, max_size=3))
def test_rows_are_independent(rows):
    z = jnp.asarray([[r[0]] for r in rows], jnp.float32)
    together = sampling.make_sampling(3, **{key: [r[1][key] for r in rows] for key in rows[0][1]})
    probs = np.asarray(to_probs(z, together))
    for i, (_, k) in enumerate(rows):
        alone = to_probs(jnp.broadcast_to(z[i], z.shape), sampling.make_sampling(3, **k))
        np.testing.assert_allclose(probs[i], alone[0], atol=1e-6)


def test_greedy_takes_the_lowest_id_on_ties():
    probs = to_probs(jnp.asarray([[[1.0, 3.0, 3.0, 0.0]]]), sampling.make_sampling(1, 0.0))
    assert probs.tolist() == [[[0, 1, 0, 0]]]


def test_tiny_temperature_does_not_overflow():
    probs = to_probs(jnp.asarray([[[1e4, 9e3, -1e4, 0.0]]]), sampling.make_sampling(1, 1e-30))
    assert probs.tolist() == [[[1, 0, 0, 0]]]


def test_bfloat16_logits_give_float32_probabilities():
    z = jax.random.normal(jax.random.key(0), (2, 3, V)).astype(jnp.bfloat16)
    k = sampling.make_sampling(2, 0.7, top_p=0.9)
    np.testing.assert_array_equal(to_probs(z, k), to_probs(z.astype(jnp.float32), k))


@pytest.mark.parametrize("vocab", [1, 2, 7, 300])
def test_draw_follows_the_weights_and_never_takes_a_zero(vocab):
    rng = np.random.default_rng(vocab)
    weights = rng.gamma(0.3, size=vocab) * (rng.random(vocab) < 0.7)
    weights[0] = 0 if vocab > 1 else 1
    weights[-1] += 0.1
    rows = 400_000
    keys = jax.random.split(jax.random.key(1), rows)
    draw = jax.jit(jax.vmap(sampling.draw, (0, None)))
    counts = np.bincount(draw(keys, jnp.asarray(weights, jnp.float32)), minlength=vocab)
    assert len(counts) == vocab and counts[weights == 0].sum() == 0
    assert testing.chi_square(counts, weights)[2] > 1e-3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "in (0, 1]"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "whole number"),
        ({"top_k": 10**400}, "top_k is a number of about 400 digits; it must be a whole number"),
        ({"temperature": 10**5000}, "temperature is a number of about 5000 digits"),
        ({"min_p": 2}, "min_p is 2"),
        ({"temperature": [1.0, 1.0, 1.0]}, "one for each of the 2 rows"),
    ],
)
def test_bad_settings(bad, message):
    with pytest.raises(UserError, match=re.escape(message)):
        sampling.make_sampling(2, **bad)


@pytest.mark.slow
def test_draws_without_replacement_at_a_large_vocabulary():
    """Rare tokens have the expected frequency, and each draw leaves out the tokens before it."""
    vocab, rows = 40_000, 3000
    weights = jnp.full((vocab,), 0.02 / (vocab - 1)).at[7].set(0.98)

    def some(keys):
        row_keys = RowKeys(keys, jnp.asarray(0), jnp.zeros(keys.shape, jnp.int32))
        return row_keys.draw_distinct(DRAFT, jnp.broadcast_to(weights, (keys.shape[0], vocab)), 2)

    tokens, exist = jax.lax.map(some, row_keys(0, rows).reshape(-1, 100))
    tokens = np.asarray(tokens).reshape(-1, 2)
    assert np.asarray(exist).all() and (tokens[:, 0] != tokens[:, 1]).all()
    # With noise of 23 bits the frequency of rare tokens is less than half of the expected.
    rare = (tokens[:, 0] != 7).sum()
    assert -3.5 < (rare - 0.02 * rows) / np.sqrt(0.02 * rows) < 4
    assert (tokens[tokens[:, 0] != 7, 1] == 7).mean() > 0.9


def test_distribution_of_draws_without_replacement():
    weights, rows = jnp.asarray([0.5, 0.0, 0.3, 0.2]), 50_000
    keys = RowKeys(row_keys(1, rows), jnp.asarray(0), jnp.zeros((rows,), jnp.int32))
    tokens, exist = keys.draw_distinct(DRAFT, jnp.broadcast_to(weights, (rows, 4)), 4)
    assert np.asarray(exist).tolist() == [[True, True, True, False]] * rows
    p, pairs = np.asarray(weights), np.zeros((4, 4))
    for i, j in [(i, j) for i in (0, 2, 3) for j in (0, 2, 3) if i != j]:
        pairs[i, j] = p[i] * p[j] / (1 - p[i])
    seen = np.bincount(np.asarray(tokens)[:, 0] * 4 + np.asarray(tokens)[:, 1], minlength=16)
    assert testing.chi_square(seen, pairs)[2] > 1e-3


def test_top_is_top_k():
    """With and without blocks, with ties, with impossible tokens, with a partial last block."""
    rng = np.random.default_rng(0)
    for vocab, count in [(7, 3), (600, 2), (5000, 8), (4096, 1), (1031, 4)]:
        scores = rng.normal(size=(3, 5, vocab)).round(1).astype(np.float32)
        scores = np.where(rng.random(scores.shape) < 0.3, -np.inf, scores)
        scores[0, 0] = -np.inf
        values, ids = sampling.top(jnp.asarray(scores), count)
        expected = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(scores, expected, -1))


@pytest.mark.parametrize("vocab", [40, 2000])
def test_top_treats_zeros_of_both_signs_as_equal(vocab):
    """The lower id comes first, within a block and between blocks, as in ``argmax``."""
    rng = np.random.default_rng(0)
    scores = -np.abs(rng.normal(size=(20, vocab))).astype(np.float32)
    places = np.sort(rng.permuted(np.tile(np.arange(vocab), (20, 1)), axis=1)[:, :6])
    zeros = np.where(rng.random(places.shape) < 0.5, np.float32(-0.0), np.float32(0.0))
    np.put_along_axis(scores, places, zeros, 1)
    scores[0, places[0]] = [-0.0, -0.0, -0.0, 0.0, 0.0, 0.0]
    ids = np.asarray(jax.jit(sampling.top, static_argnums=1)(jnp.asarray(scores), 4)[1])
    np.testing.assert_array_equal(ids, places[:, :4])
    np.testing.assert_array_equal(sampling.argmax(jnp.asarray(scores)), ids[:, 0])
