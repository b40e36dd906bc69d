"""Sliding windows: ring caches hold what later tokens read, and change no text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import begin, oracle, speculate
from marks import by_default

from specjax import accept, cache, drafters, prompt, testing, tree
from specjax.errors import UserError
from specjax.models import attention, lm
from specjax.theory import roofline
from specjax.types import ModelParams

WINDOW, SLOTS = 5, 40
VOCAB = 32
LENGTHS = (13, 1, 8)


def config_of(windows):
    return dataclasses.replace(testing.tiny_config(vocab_size=VOCAB), windows=windows)


def model_of(windows, seed=0):
    """A decoder whose next tokens depend strongly on the text."""
    config = config_of(windows)
    params = lm.init_params(config, jax.random.key(seed))
    return lm.from_config(config), jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)


MODEL, PARAMS = model_of((WINDOW, None))
PARENTS = (-1, 0, 0, 1, 3, 4, 2)
PATHS = ((0, 1, 3, 4, 5), (0, 2, 6, 0, 0), (0, 1, 3, 0, 0))


def differences(chunk=7):
    """The largest difference between passes over a ring and passes over whole texts.

    Ragged rows are prefilled in chunks longer than the ring, then fed a chain, a tree and a chain.
    """
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, VOCAB, size).tolist() for size in LENGTHS]
    whole = jax.jit(lambda tokens: lm.forward(MODEL, PARAMS, tokens).logits)

    def expected(text):
        padded = jnp.asarray([text + [0] * (SLOTS - len(text))])
        return np.asarray(whole(padded))[0, len(text) - 1]

    tokens, lengths = prompt.pack_prompts(texts)
    _, rings = prompt.feed(MODEL, PARAMS, tokens, lengths, MODEL.init_cache(3, SLOTS), chunk)
    worst = 0.0
    # All blocks have one size, so that each operation is compiled once.
    chain = (range(-1, 6), [range(7)] * 3, (2, 7, 1))
    for parents, paths, counts in (chain, (PARENTS, PATHS, (5, 3, 0)), chain):
        fed = draw.integers(0, VOCAB, (3, len(parents)))
        layout = tree.layout(jnp.asarray([list(parents)] * 3))
        out, block = MODEL.apply(PARAMS, jnp.asarray(fed), rings, layout)
        for row, text in enumerate(texts):
            for node in range(len(parents)):
                path = [node]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                got = np.asarray(out.logits[row, node])
                worst = max(worst, np.abs(got - expected(text + fed[row, path].tolist())).max())
            texts[row] = text + [int(fed[row, i]) for i in list(paths[row])[: counts[row]]]
        path = jnp.asarray([list(path) for path in paths])
        rings = MODEL.commit(rings, block, jnp.asarray(counts), path)
    return worst


def test_passes_over_a_ring_are_those_over_the_text():
    assert [x.shape[2] for x in MODEL.init_cache(1, SLOTS).k] == [WINDOW, SLOTS]
    assert differences() < 1e-4


@pytest.mark.slow
def test_windows_stay_inside_a_document():
    """Two documents in one row, for training; both are longer than the window."""
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, VOCAB, (1, 17)))
    numbers = jnp.asarray([[0] * 9 + [1] * 8])
    got = lm.forward(MODEL, PARAMS, tokens, numbers).logits[0]
    for part in (slice(0, 9), slice(9, 17)):
        alone = lm.forward(MODEL, PARAMS, tokens[:, part]).logits[0]
        np.testing.assert_allclose(got[part], alone, rtol=0, atol=1e-4)


def zeros_for_rejected(buffer, new, start, count):
    """The plain write, made circular: rejected tokens overwrite positions that are still read."""
    return RIGHT["write_ring"](buffer, new, start, jnp.full_like(count, new.shape[1]))


def first_of_a_slot(buffer, new, start, count):
    """Of several tokens for one slot the first is kept."""
    return RIGHT["write_ring"](buffer, new, start, jnp.minimum(count, buffer.shape[2]))


def without_wrap(buffer, new, start, count):
    """Positions beyond the ring go to its last slots."""
    return cache.write(buffer, new[:, : buffer.shape[2]], start)


RIGHT = {"write_ring": cache.write_ring, "newest": cache.newest}
WRONG = {
    "zeros": (cache, "write_ring", zeros_for_rejected),
    "first of a slot": (cache, "write_ring", first_of_a_slot),
    "no ring": (cache, "write_ring", without_wrap),
    "a position late": (cache, "newest", lambda length, size: RIGHT["newest"](length + 1, size)),
    "slots as positions": (
        cache,
        "newest",
        lambda length, size: jnp.where(jnp.arange(size) < length[:, None], jnp.arange(size), -1),
    ),
    "no window in a block": (
        attention,
        "_visible",
        lambda past, slots, window: past.layout.visible,
    ),
    "places for depths": (
        attention,
        "_visible",
        lambda past, slots, window: (
            past.layout.visible
            & (
                jnp.arange(past.layout.visible.shape[1])[:, None]
                - jnp.arange(past.layout.visible.shape[2])
                < window
            )
            if window
            else past.layout.visible
        ),
    ),
    "no window in the cache": (
        attention,
        "_committed",
        lambda past, slots, window: RIGHT["newest"](past.length, slots)[:, None] >= 0,
    ),
}


@pytest.mark.parametrize("name", by_default(WRONG, ()))
def test_wrong_rings_are_noticed(name, monkeypatch):
    module, function, wrong = WRONG[name]
    monkeypatch.setattr(module, function, wrong)
    assert not differences() < 1e-2


@pytest.mark.parametrize("drafter", by_default(["lookup", "draft model", "tree"], ["lookup"]))
def test_speculation_over_rings_is_plain_decoding(drafter):
    """Texts of more than 40 tokens, ten times the window; the draft model has windows too."""
    draft, draft_params = model_of((3, WINDOW), seed=1)
    method, keys, own = {
        "lookup": ("prompt_lookup", {"gamma": 4}, {}),
        "draft model": ("draft_model", {"model": draft, "gamma": 2}, draft_params),
        "tree": ("draft_tree", {"model": draft, "tree": "2x2"}, draft_params),
    }[drafter]
    made = drafters.make(method, MODEL, **keys)
    rule = accept.default_rule(made)
    pair = ModelParams(PARAMS, own)
    got, *_ = speculate(MODEL, made, rule, pair)
    assert got == oracle(MODEL, ModelParams(PARAMS))
    full, params = model_of(())
    assert got != oracle(full, ModelParams(params))


def test_drafts_longer_than_a_window_are_refused():
    made = drafters.make("prompt_lookup", MODEL, gamma=WINDOW)
    with pytest.raises(UserError, match=r"has up to 5 tokens .* window of lm has 5 .* at most 4 t"):
        begin(MODEL, made, ModelParams(PARAMS))
    full, _ = model_of(())
    with pytest.raises(UserError, match=r"draft_model has up to 5 tokens .* at most 4 tokens"):
        drafters.make("draft_model", full, model=MODEL, params=PARAMS, gamma=WINDOW)
    assert drafters.make("draft_model", full, model=MODEL, params=PARAMS, gamma=4).longest == 4


def test_the_cost_model_refuses_windows():
    with pytest.raises(UserError, match="the roofline model has no sliding windows"):
        roofline.model_of(config_of((WINDOW, None)))
