"""An overlay continues the text of a cache that it does not write."""

from __future__ import annotations

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import decode, tree
from specjax.models import lm, overlay
from specjax.testing import tiny, tiny_config, whole_text

V, SLOTS, ROOM = 8, 40, 12
LENGTHS = jnp.array([1, 7, 4, 6])
PARENTS = jnp.array([-1, 0, 0, 1, 2])


@functools.cache
def model_of(name):
    if name == "table":
        return cases.models(V)[0], cases.table(0, V)
    if name == "whole text":
        return whole_text(cases.models(V)[0]), cases.table(0, V)
    if name == "windows":
        config = tiny_config("llama", V, layers=3)
        config = dataclasses.replace(config, windows=(6, None, 8))
        return lm.from_config(config), tiny(vocab_size=V, layers=3)[1]
    return tiny(name, vocab_size=V, layers=3)


def text_of(seed, size):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, (4, size)), jnp.int32)


def committed(model, params, cache):
    """The cache after ragged texts of LENGTHS tokens."""
    return decode.feed(model, params, text_of(0, 7), LENGTHS, cache, chunk=3)[1]


def rounds(model, params, cache, logits):
    """Three blocks after the cache: a chain, a tree in two calls, a chain. Ragged commits."""

    @jax.jit
    def chain(cache, tokens, count):
        out, block = model.apply(params, tokens, cache)
        return out.logits, model.commit(cache, block, count)

    @jax.jit
    def nodes(cache, tokens, count, path):
        parents = jnp.broadcast_to(PARENTS, (4, 5))
        first, block = model.apply(params, tokens[:, :3], cache, tree.layout(parents[:, :3]))
        last, more = model.apply(params, tokens[:, 3:], cache, tree.layout(parents, 2), block)
        cache = model.commit(cache, tree.join(block, more), count, path)
        return jnp.concatenate([first.logits, last.logits], 1), cache

    out, cache = chain(cache, text_of(1, 4), jnp.array([1, 4, 0, 2]))
    logits.append(out)
    path = jnp.array([[0, 2, 4], [0, 1, -1], [0, 1, 3], [0, -1, -1]])
    out, cache = nodes(cache, text_of(2, 5), jnp.array([3, 2, 3, 0]), path)
    logits.append(out)
    out, cache = chain(cache, text_of(3, 4), jnp.array([4, 0, 1, 2]))
    logits.append(out)
    return cache


NAMES = ("table", "whole text", "llama", "gpt2", "windows")


@pytest.mark.parametrize("name", by_default(NAMES, ("whole text",)))
@pytest.mark.parametrize("above", by_default((1, 2), (1,)))
def test_an_overlay_is_the_model_with_a_longer_text(name, above):
    model, params = model_of(name)
    base = committed(model, params, model.init_cache(4, SLOTS))
    plain, over = [], []
    expected = rounds(model, params, base, plain)
    # With two overlays, the lower one has a part of the text in its buffer.
    top, cache = model, base
    if above == 2:
        half = jnp.minimum(LENGTHS, 3)
        short = decode.feed(model, params, text_of(0, 7), half, model.init_cache(4, SLOTS))[1]
        cache = overlay.open_on(model, params, short, ROOM)
        top = overlay.overlay(model)
        cut = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (4,)))
        rest = cut(jnp.pad(text_of(0, 7), ((0, 0), (0, 4))), half)
        cache = top.commit(cache, top.apply(params, rest, cache)[1], LENGTHS - half)
    cache = overlay.open_on(top, params, cache, ROOM)
    top = overlay.overlay(top)
    assert overlay.depth_of(cache) == above
    before = jax.tree.map(np.asarray, cache.base)
    cache = rounds(top, params, cache, over)
    for ours, theirs in zip(over, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    jax.tree.map(np.testing.assert_array_equal, cache.base, before)
    np.testing.assert_array_equal(cache.length, expected.length)
    if above == 2:
        return
    # What is settled is what the model would have committed, up to a length in each row.
    kept = jnp.array([True, True, True, False])
    settled = jax.jit(overlay.settle)(cache, jnp.array([4, 99, 5, 99]), kept)
    count = jnp.array([3, 6, 1, 0])
    np.testing.assert_array_equal(settled.base.length, LENGTHS + count)
    assert not settled.count.any()
    again, _ = model.apply(params, text_of(4, 3), settled.base)
    direct = model.commit(base, cache.block, count)
    other, _ = model.apply(params, text_of(4, 3), direct)
    np.testing.assert_allclose(again.logits, other.logits, atol=2e-4)


def test_settling_reaches_the_chosen_overlay_of_a_state():
    model, params = model_of("table")
    base = committed(model, params, model.init_cache(4, SLOTS))
    lower = overlay.open_on(model, params, base, ROOM)
    top = overlay.overlay(model)
    lower = top.commit(lower, text_of(1, 2), jnp.full((4,), 2))
    upper = overlay.open_on(top, params, lower, ROOM)
    upper = overlay.overlay(top).commit(upper, text_of(2, 2), jnp.full((4,), 2))
    every, state = jnp.ones((4,), bool), {"cache": upper, "other": jnp.arange(3)}
    first = overlay.settle_all(state, 2, LENGTHS + 3, every)
    np.testing.assert_array_equal(first["other"], np.arange(3))
    assert first["cache"].base.count.tolist() == [3] * 4 and not first["cache"].count.any()
    second = overlay.settle_all(first, 1, LENGTHS + 9, every)["cache"]
    np.testing.assert_array_equal(second.base.base.length, LENGTHS + 3)
    expected = jnp.concatenate([text_of(1, 2), text_of(2, 2)[:, :1]], 1)
    for row, length in enumerate(LENGTHS.tolist()):
        stored = second.base.base.entries[row, length : length + 3]
        np.testing.assert_array_equal(stored, expected[row])


@pytest.mark.slow
def test_nan_of_a_rejected_token_does_not_reach_the_buffer():
    model, params = tiny(vocab_size=V)
    base = committed(model, params, model.init_cache(4, SLOTS))
    cache, top = overlay.open_on(model, params, base, ROOM), overlay.overlay(model)
    _, block = top.apply(params, text_of(1, 3), cache)
    bad = jax.tree.map(lambda x: x.at[:, 1:].set(jnp.nan), block)
    after = top.commit(cache, bad, jnp.ones((4,), jnp.int32))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(after.block))


def test_an_overlay_makes_no_cache_and_has_no_parts():
    top = overlay.overlay(tiny(vocab_size=V)[0])
    assert top is overlay.overlay(tiny(vocab_size=V)[0])
    with pytest.raises(TypeError, match="continues the text of another cache"):
        top.init_cache(1, 8)
    assert top.inside.part is None
