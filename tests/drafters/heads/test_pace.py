"""D-PACE: weights of depths by how likely the draft is to reach them, against the formula."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import heads_of
from internals import heads_along_text as _along_text
from internals import heads_block as _block
from internals import heads_heads as _heads
from internals import heads_masked_text as _masked_text
from internals import network_of

from specjax import drafters, testing
from specjax.divergences import lk_hybrid
from specjax.errors import UserError
from specjax.tree import chain_layout
from specjax.types import Batch, ModelParams

VOCAB, ALPHA, DEPTH = 16, 0.3, 3
# Drafter -> keys, keys of its loss under which every place has all depths.
METHODS = {
    "block_head": ({"block": DEPTH + 1, "layers": 1}, {}),
    "eagle3": ({"parallel": DEPTH, "layers": 1}, {"ce": 1.0, "teacher": 0.5, "keep": 1.0}),
    "pard": ({"gamma": DEPTH, "mask_id": 15}, {"keep": 1.0}),
    "medusa": ({"heads": DEPTH}, {}),
}


@functools.cache
def target_of():
    return testing.tiny("llama", 0, 4.0, layers=4, vocab_size=VOCAB)


def made(name):
    """(drafter, its parameters, its logits along a text as a function)."""
    target, params = target_of()
    keys = METHODS[name][0]
    if name == "pard":
        model, own = testing.tiny("llama", 1, 4.0, layers=1, vocab_size=VOCAB)
        drafter = drafters.make(name, target, model=model, params=own, **keys)
        reader = network_of(drafter)
        return drafter, own, functools.partial(_masked_text.along, reader)
    drafter = cases.random_heads(name, target, params, scale=0.3, **keys)
    own = drafter.init_params(None)
    if name == "medusa":
        heads = heads_of(name, target, params=own, **keys)
        return drafter, own, functools.partial(_heads.along, heads, target)
    first = network_of(drafter)
    if name == "block_head":
        tapped = target.with_taps(drafter.taps)
        return drafter, own, functools.partial(_block.along, first, tapped)
    return drafter, own, functools.partial(_masked_text.along, first)


def plain_loss(texts, counted, ce, teacher) -> float:
    """Sum over depths of w_k l_k with w_k = sum over j >= k of the products up to j."""
    losses, products, reached = [], [], 1.0
    for (labels, logits, right), here in zip(texts, counted, strict=True):
        log_q, log_p = (np.asarray(jax.nn.log_softmax(x), np.float64) for x in (logits, right))
        own = np.take_along_axis(log_q, np.asarray(labels)[..., None], -1)[..., 0]
        divergence = (np.exp(log_p) * (log_p - log_q)).sum(-1)
        losses.append(np.where(here, -ce * own + teacher * divergence, 0))
        reached = reached * np.where(here, (1 - ALPHA) * np.exp(own) + ALPHA, 1)
        products.append(np.where(here, reached, 0))
    total = 0.0
    for k, each in enumerate(losses):
        total += (sum(products[k:]) * each).sum()
    return total / counted[0].sum()


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if each == "eagle3" else pytest.mark.slow) for each in METHODS],
)
def test_loss_is_the_formula(name):
    drafter, own, along = made(name)
    _, params = target_of()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 9)))
    # Some tokens are no labels: their depth is left out, and the depths behind it are not.
    labelled = jnp.asarray(np.random.default_rng(1).random((2, 9)) < 0.8)
    batch, keys = Batch(tokens, labelled=labelled), METHODS[name][1]
    ahead = 1 if name == "pard" else 2
    weights = {"ce": 0.7, "teacher": 0.5} | keys
    loss = jax.jit(functools.partial(drafter.training.loss, **weights, pace=ALPHA))
    value, _ = loss(own, params, batch, jax.random.key(0))
    texts = list(jax.jit(lambda pair: list(along(pair, batch, DEPTH)))(ModelParams(params, own)))
    counted = [np.asarray(_along_text.label(batch, d + ahead, d)[1]) for d in range(DEPTH)]
    right = plain_loss(texts, counted, weights["ce"], weights["teacher"])
    np.testing.assert_allclose(value, right, rtol=2e-4)


def test_weights_of_drafts_whose_deeper_depths_are_dropped():
    """An entry has the weights of a draft of the depths that it keeps."""
    rows, size, draw = 2, 9, np.random.default_rng(0)
    table = draw.normal(size=(DEPTH, rows, size, VOCAB)) * 2
    values = jnp.asarray(table, jnp.float32)
    read = _masked_text.Read(values[0], chain_layout(rows, size), None, values[0])

    def masked(pair, read, layout):
        place = layout.visible[..., :size].sum(-1) - 1
        return values[layout.depth[:, size:] - place, jnp.arange(rows)[:, None], place]

    reader = _masked_text.Reader(lambda pair, batch: read, masked, ahead=1)
    tokens, key = draw.integers(0, VOCAB, (rows, size + 1)), jax.random.key(0)
    batch = Batch(jnp.asarray(tokens))
    args = (reader, DEPTH, {}, {}, batch, key)
    value, _ = _masked_text.loss(*args, keep=0.6, floor=0.2, pace=ALPHA)
    masks = _masked_text.random_masks(key, batch, 1, [0.6, 0.36])
    total, numbers = 0.0, set()
    for row in range(rows):
        for place in range(size):
            kept = masks.depths[np.asarray(masks.places[row]) == place]
            depths = [d for d in (0, *kept.tolist()) if place + d < size]
            scores = table[depths, row, place]
            log_q = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
            own = np.asarray([log_q[i, tokens[row, place + 1 + d]] for i, d in enumerate(depths)])
            products = np.cumprod((1 - ALPHA) * np.exp(own) + ALPHA)
            total -= sum(products[k:].sum() * own[k] for k in range(len(depths)))
            numbers.add(len(depths))
    assert numbers == {1, 2, 3}
    np.testing.assert_allclose(value, total / (rows * size), rtol=1e-5)


def test_weights_are_constants_and_one_pass_is_enough():
    """The gradient is that of the loss with fixed weights."""
    drafter, own, along = made("medusa")
    _, params = target_of()
    batch = Batch(jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 9))))

    def fixed(own):
        losses, products, reached = [], [], 1.0
        for d, (labels, logits, _) in enumerate(along(ModelParams(params, own), batch, DEPTH)):
            here = _along_text.label(batch, d + 2, d)[1]
            q = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
            losses.append(jnp.where(here, -q, 0))
            reached = reached * ((1 - ALPHA) * jax.lax.stop_gradient(jnp.exp(q)) + ALPHA)
            products.append(jnp.where(here, reached, 0))
        total = sum((sum(products[k:]) * each).sum() for k, each in enumerate(losses))
        return total / (2 * 7)

    ours = jax.jit(jax.grad(lambda x: drafter.training.loss(x, params, batch, None, pace=ALPHA)[0]))
    for got, right in zip(
        jax.tree.leaves(ours(own)), jax.tree.leaves(jax.jit(jax.grad(fixed))(own)), strict=True
    ):
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-5)


def test_errors():
    drafter, own, _ = made("medusa")
    batch = Batch(jnp.zeros((1, 9), jnp.int32))
    for keys, message in (
        ({"pace": 2.0}, "loss.pace is 2.0; it must be a number in"),
        ({"pace": 0.5, "decay": 0.8}, "both are weights of depths"),
        ({"pace": 0.5, "slots": "one"}, "one depth at a time"),
    ):
        with pytest.raises(UserError, match=message):
            drafter.training.loss(own, target_of()[1], batch, jax.random.key(0), **keys)


def test_hybrid_loss_is_the_formula():
    """w KL + (1 - w) (1 - alpha), w = exp(-3 alpha), a constant for the gradient."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(2, 5, 7)) * 2
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in logits)
    alpha = np.minimum(p, q).sum(-1)
    kl, weight = (p * np.log(p / q)).sum(-1), np.exp(-3 * alpha)
    right = weight * kl + (1 - weight) * (1 - alpha)
    np.testing.assert_allclose(lk_hybrid(*map(jnp.asarray, logits)), right, rtol=1e-5)
    gradient = jax.grad(lambda x: lk_hybrid(jnp.asarray(logits[0]), x).sum())(
        jnp.asarray(logits[1])
    )
    # d KL = q - p; d (1 - alpha) = -q (1[q < p] - sum of q where q < p).
    below = q < p
    change = -q * (below - (q * below).sum(-1, keepdims=True))
    fixed = weight[:, None] * (q - p) + (1 - weight[:, None]) * change
    np.testing.assert_allclose(gradient, fixed, atol=1e-5)
