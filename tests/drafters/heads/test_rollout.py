"""Draft networks along a text: the same logits as real drafting, and the forecasts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import network_cases as shared
import numpy as np
import pytest

from specjax import cache as cache_lib
from specjax import tree
from specjax.models import lm
from specjax.types import Batch

QUICK = ("eagle3, 2 layers",)
NAMES = [pytest.param(n, marks=pytest.mark.slow if n not in QUICK else ()) for n in shared.SHAPES]
# Documents, and padding.
SEGMENTS = np.array([[1] * 7 + [2] * 7, [1] * 5 + [2] * 7 + [0] * 2])


def drafted_logits(network, params, tokens):
    """f[T,steps,V_d] of one document i32[T+1], as a drafter computes them.

    For column t the slots 0..t go into the cache with the target's features; each further step
    feeds one node of the block.
    """
    model = shared.tapped(network)
    out = lm.forward(model, params.target, tokens[None, :-1])
    features, size = network.read(params, out), len(tokens) - 1
    cache = network.init_cache(1, size)
    read = tokens[None, network.shape.shift : size + network.shape.shift]
    known, own = network.apply(params, read, features, cache)

    def column(t):
        kept = cache_lib.commit(cache, own, t[None] + 1)
        fed, block = jax.tree.map(lambda x: x[:, t, None], known), None
        result = [network.logits(params, fed.hidden)[0, 0]]
        for j in range(1, shared.STEPS):
            token = tokens[jnp.minimum(t + j + network.shape.shift, size)][None, None]
            fed, new = network.apply(params, token, fed.feature, kept, None, block)
            block = new if block is None else tree.join(block, new)
            result.append(network.logits(params, fed.hidden)[0, 0])
        return jnp.stack(result)

    return jax.lax.map(column, jnp.arange(size))


@pytest.mark.parametrize("shift", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_columns_are_real_drafts(name, shift):
    """Every step of every column equals j draft tokens after a cache; packed documents too."""
    network = shared.network(**shared.SHAPES[name], shift=shift)
    params = shared.random_params(network)
    plain = shared.logits_along(network, params, Batch(jnp.asarray(shared.TOKENS)))
    packed = shared.logits_along(
        network, params, Batch(jnp.asarray(shared.TOKENS), segments=jnp.asarray(SEGMENTS))
    )
    one = jax.jit(functools.partial(drafted_logits, network))
    # Seven tokens each: the start of a row, the last document of a row, and one in the middle.
    for result, tokens in (
        (plain[0], shared.TOKENS[0, :7]),
        (packed[0, 7:], shared.TOKENS[0, 7:]),
        (packed[1, 5:], shared.TOKENS[1, 5:12]),
    ):
        expected = one(params, jnp.asarray(tokens))
        for j in range(shared.STEPS):
            last = len(tokens) - 1 - j  # the columns whose step j has a token to read
            np.testing.assert_allclose(
                result[:last, j], expected[:last, j], rtol=1e-5, atol=1e-5, err_msg=f"step {j}"
            )
