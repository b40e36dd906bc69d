"""The loss of Falcon's network: glancing distillation (2412.12639, section 3.1).

Two passes over each row. The first one, without gradients, predicts; the number d of its tokens
that differ from the target's preferred ones is the row's own. In the second one N = rate * d slots
read the input of the slot k further on: its feature and its token, which are what they are to
predict. The rate falls during training. The loss is that of the second pass.

These slots are in blocks that are chosen at random; of each such block the first slots are taken,
fewer than all, as in the authors' code. There only the first row of a batch is changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling, tree
from specjax.checks import number, one_of
from specjax.divergences import DIVERGENCES, overlap
from specjax.drafters import _glancing
from specjax.drafters.heads import _falcon_network as network
from specjax.drafters.heads import _text
from specjax.drafters.heads._falcon_network import Net
from specjax.drafters.heads._rollout_loss import _smooth_l1
from specjax.errors import UserError
from specjax.tree import Layout
from specjax.types import LM, Batch, ModelParams, Output


class Blocks(NamedTuple):
    """The blocks that the slots of a text are divided into."""

    number: jax.Array  # i32[B,T] of the slot's block in its row, from 0
    place: jax.Array  # i32[B,T] of the slot in its block
    whole: jax.Array  # bool[B,T] False: before the first whole block of its document


def layout_of(batch: Batch) -> Layout:
    """How the slots of a batch follow each other inside their documents."""
    rows, size = batch.tokens.shape
    if batch.segments is None:
        return tree.chain_layout(rows, size - 1)
    return tree.segments(batch.segments[:, :-1])


def blocks_of(depth: jax.Array, phase: jax.Array, size: int) -> Blocks:
    """The blocks of slots at ``depth`` i32[B,T] of their documents.

    The first whole block of a document begins at slot phase[b], 0 to size - 1.
    """
    shifted = depth + size - phase[:, None]
    place = shifted % size
    begins = (place == 0) | (depth == 0)
    return Blocks(jnp.cumsum(begins, 1) - 1, place, depth >= phase[:, None])


def relaxed(layout: Layout, blocks: Blocks) -> Layout:
    """The layout in which a slot reads its whole block and all before it in its document."""
    begin = (jnp.arange(layout.depth.shape[1]) - layout.depth)[..., None]
    same = begin == begin.swapaxes(1, 2)
    visible = blocks.number[:, :, None] >= blocks.number[:, None]
    return Layout(same & visible, layout.depth)


def glanced(
    blocks: Blocks, counted: jax.Array, order: jax.Array, runs: jax.Array, count: jax.Array
) -> jax.Array:
    """bool[B,T]: the slots of each row that are given what they are to predict.

    Of the blocks in ascending ``order`` f[B,T] (entry g is that of block g), the first runs[b,g]
    slots each, until there are count[b]; only slots with a label, bool ``counted``.
    """
    own = jnp.take_along_axis(runs, blocks.number, 1)
    free = counted & blocks.whole & (blocks.place < own)
    rank = jnp.argsort(jnp.argsort(order, 1), 1)
    rank = jnp.take_along_axis(rank, blocks.number, 1)
    size = counted.shape[1]
    # The slots of a block stay in sequence.
    return _glancing.first(free, rank * size + jnp.arange(size), count)


def loss(
    net: Net,
    target: LM,
    params: Any,
    target_params: Any,
    batch: Batch,
    key: jax.Array,
    *,
    feature: float = 1.0,
    weight: float = 0.1,
    hard: float = 0.1,
    divergence: str = "forward_kl",
    glancing: float = 0.4,
    noise: float = 0.1,
    dropout: float = 0.1,
    run_steps: int = 0,
) -> tuple[jax.Array, dict[str, Any]]:
    """Loss f32[] per label, and metrics.

        feature * smooth L1 (beta 1, mean over the width) from the target's feature k tokens ahead
        + weight * ((1 - hard) * divergence from the target's distribution
                    + hard * cross-entropy with the token that the target prefers)

    Every slot has one label, at its place in a block. ``glancing``: the rate at the first step; at
    step e of ``run_steps`` it is glancing * (1 - e / run_steps); without ``Batch.step`` it does not
    fall. ``noise``: uniform in [-noise, noise], added to all features that are read. ``dropout``:
    of the outputs of the first LSTM layer in the second pass.

    Metrics for each depth d from 1 to k: ``agreement_<d>`` and ``alpha_<d>``, the acceptance rates
    at temperature 0 and 1; ``glanced``, the share of labels whose slot was given its answer;
    ``scale`` and ``uniform`` as in the loss of heads. As labels the target's logits and features
    are constants, as inputs they are not.

    Raises:
        UserError: values out of range, values without effect, a text that is too short.
    """
    _check(net, batch, feature, weight, hard, divergence, glancing, noise, dropout)
    pair, keys = ModelParams(target_params, params), jax.random.split(key, 4)
    batch = _text.of_output(target, batch)
    out = _text.output(target, target_params, batch)
    layout, rows = layout_of(batch), len(batch.tokens)
    phase = jax.random.randint(keys[0], (rows,), 0, net.block)
    blocks = blocks_of(layout.depth, phase, net.block)
    labels = _labels(net, jax.lax.stop_gradient(out), batch, blocks)
    inputs = slots_of(net, out.hidden, batch)
    shape, dtype = inputs[1].shape, inputs[1].dtype
    added = jax.random.uniform(keys[1], shape, dtype, -noise, noise) if noise else 0
    given = jnp.zeros_like(labels.counted)
    if glancing:
        seen = jax.lax.stop_gradient((pair, inputs[0], inputs[1] + added))
        first = network.logits(net, seen[0], forward(net, *seen, layout, blocks))
        rate = glancing * (1 - _glancing.progress(batch, run_steps))
        given = choose(keys[2], blocks, labels, sampling.argmax(first), rate)
    tokens, features = answered(net, *inputs, given)
    kept = None
    if dropout:
        kept = jax.random.bernoulli(keys[3], 1 - dropout, shape) / jnp.asarray(1 - dropout, dtype)
    hidden = forward(net, pair, tokens, features + added, layout, blocks, kept)
    terms = feature, weight, hard, DIVERGENCES[divergence]
    return _compare(net, pair, terms, labels, blocks, hidden, given)


class _Labels(NamedTuple):
    """What the slots are compared with."""

    features: jax.Array  # [B,T,D] the target's, k tokens ahead
    logits: jax.Array  # f[B,T,V]
    best: jax.Array  # i32[B,T]
    counted: jax.Array  # bool[B,T]


def _labels(net: Net, out: Output, batch: Batch, blocks: Blocks) -> _Labels:
    """Raises UserError for a batch whose labels belong to single depths of drafts."""
    if batch.depths is not None:
        raise UserError(
            "falcon learns whole blocks, not the depths of single tokens; give "
            "online.positions='emitted'"
        )
    size = out.hidden.shape[1]
    hidden, logits = (_text.ahead(x, net.block, size) for x in (out.hidden, out.logits))
    counted = _text.label(batch.replace(output=None), net.block + 1)[1]
    if batch.output is not None:
        # The pending token of a draft is the one after the last slot of its block.
        pending = jnp.arange(size) - blocks.place + net.block
        counted &= pending >= batch.output[:, None]
    return _Labels(hidden, logits, sampling.argmax(logits), counted & blocks.whole)


def slots_of(net: Net, features: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """What the slots read: tokens i32[B,T] and features [B,T,D]."""
    return _text.ahead(batch.tokens, 1, features.shape[1]), features


def forward(
    net: Net,
    params: ModelParams,
    tokens: jax.Array,
    features: jax.Array,
    layout: Layout,
    blocks: Blocks,
    kept: jax.Array | None = None,
) -> jax.Array:
    """[B,T,D]: the network's output at all slots of a text, in these blocks."""
    none = network.no_carry(net, params, len(tokens))
    outputs, _ = network.recur(net, params, tokens, features, none, layout.depth == 0, kept)
    cache = network.no_text(net, params, len(tokens), 0).cache
    return network.predict(net, params, outputs, cache, relaxed(layout, blocks))[0]


def answered(
    net: Net, tokens: jax.Array, features: jax.Array, given: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What slots read, tokens and features: where ``given`` bool[B,T], what slot t + k reads."""
    token, feature = (_text.ahead(x, net.block, x.shape[1]) for x in (tokens, features))
    return jnp.where(given, token, tokens), jnp.where(given[..., None], feature, features)


def choose(
    key: jax.Array, blocks: Blocks, labels: _Labels, predicted: jax.Array, rate: Any
) -> jax.Array:
    """bool[B,T]: ``glanced`` slots, in every row ``rate`` times as many as are wrong there."""
    count = _glancing.count(labels.counted & (predicted != labels.best), rate)
    keys, shape = jax.random.split(key), blocks.number.shape
    longest = jnp.max(blocks.place)  # k - 1; a block of one slot is given as a whole
    runs = jax.random.randint(keys[0], shape, 1, jnp.maximum(longest, 1) + 1)
    return glanced(blocks, labels.counted, jax.random.uniform(keys[1], shape), runs, count)


def _compare(
    net: Net,
    params: ModelParams,
    terms: tuple,
    labels: _Labels,
    blocks: Blocks,
    hidden: jax.Array,
    given: jax.Array,
) -> tuple[jax.Array, dict[str, Any]]:
    """The loss and its metrics."""
    feature, weight, hard, divergence = terms
    counted, logits = labels.counted, network.logits(net, params, hidden)
    whole = counted.sum().astype(jnp.float32)

    def mean(values: jax.Array, over: jax.Array = counted) -> jax.Array:
        return jnp.where(over, values, 0).sum() / jnp.maximum(over.sum(), 1)

    def distance(logits: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(logits)
        log_probs = jnp.broadcast_to(log_probs, labels.logits.shape)
        chosen = jnp.take_along_axis(log_probs, labels.best[..., None], -1)[..., 0]
        return (1 - hard) * divergence(labels.logits, logits) - hard * chosen

    value = feature * _smooth_l1(hidden - labels.features) + weight * distance(logits)
    # [V] only: XLA would fold a constant of the whole shape, slowly.
    guess = weight * distance(jnp.zeros(logits.shape[-1], logits.dtype))
    metrics: dict[str, Any] = {
        "scale": jnp.float32(feature + weight),
        "uniform": mean(feature * _smooth_l1(labels.features) + guess),
        "glanced": mean(given.astype(jnp.float32)),
    }
    weights: dict[str, jax.Array] = dict.fromkeys(("loss", *metrics), whole)
    same = sampling.argmax(logits) == labels.best
    shared = jax.lax.stop_gradient(overlap(labels.logits, logits))
    for place in range(net.block):
        own = counted & (blocks.place == place)
        each = {f"agreement_{place + 1}": mean(same, own), f"alpha_{place + 1}": mean(shared, own)}
        metrics |= each
        weights |= dict.fromkeys(each, own.sum().astype(jnp.float32))
    return mean(value), {**metrics, "weight": weights}


def _check(
    net: Net,
    batch: Batch,
    feature: float,
    weight: float,
    hard: float,
    divergence: str,
    glancing: float,
    noise: float,
    dropout: float,
) -> None:
    for name, value in (("feature", feature), ("weight", weight), ("noise", noise)):
        number(f"loss.{name}", value, ">= 0", lambda x: x >= 0)
    for name, value in (("hard", hard), ("glancing", glancing)):
        number(f"loss.{name}", value, "in [0, 1]", lambda x: 0 <= x <= 1)
    number("loss.dropout", dropout, "in [0, 1)", lambda x: 0 <= x < 1)
    one_of("loss.divergence", divergence, tuple(DIVERGENCES))
    if not (feature or weight):
        raise UserError("loss.feature and loss.weight are both 0; make one of them positive")
    for name, value, usual in (("hard", hard, 0.1), ("divergence", divergence, "forward_kl")):
        if value != usual and not weight:
            raise UserError(
                f"loss.{name} is {value!r} and loss.weight is 0; give loss.weight, or leave "
                f"loss.{name} out"
            )
    if divergence != "forward_kl" and hard == 1:
        raise UserError(
            f"loss.divergence is {divergence!r} and loss.hard is 1, so it has no effect; lower "
            "loss.hard, or leave loss.divergence out"
        )
    if batch.tokens.shape[1] < 2 * net.block + 1:
        raise UserError(
            f"a block of {net.block} tokens is predicted from {net.block} others; raise "
            f"train.length to {2 * net.block} or more, or lower drafter.block"
        )
