"""Falcon's network along a text: the loss of its blocks, and the drafts at every place.

Slot t has token t + 1 and the feature of token t (``_network``). In training a row of text
is divided into blocks of k slots. While decoding the last slot of a block is that of the pending
token, wherever this is in the text; so the first whole block of a training row begins at one of the
first k slots, chosen at random: every slot is trained as every place of a block.

The loss is glancing distillation (2412.12639, section 3.1). Two passes over each row. The first
one, without gradients, predicts; the number d of its tokens that differ from the target's preferred
ones is the row's own. In the second one N = rate * d slots read the input of the slot k further on:
its feature and its token, which are what they are to predict. The rate falls during training. The
loss is that of the second pass.

These slots are in blocks that are chosen at random; of each such block the first slots are taken,
fewer than all, as in the authors' code. There only the first row of a batch is changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import declare, sampling, tree
from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.declare import key
from specjax.divergences import DIVERGENCES, overlap
from specjax.drafters.growth import Plan
from specjax.drafters.heads import _along_text, _depth_loss
from specjax.drafters.heads._along_text import Drafts, Texts, ahead
from specjax.drafters.heads._depth_loss import mean
from specjax.drafters.heads.eagle._loss import smooth_l1
from specjax.drafters.heads.eagle._network import logits as logits_of
from specjax.drafters.heads.falcon import _network as network
from specjax.drafters.heads.falcon._network import Net
from specjax.errors import UserError
from specjax.tree import Columns, Layout
from specjax.types import LM, Array, Batch, ModelParams, Output, Training


class Text(NamedTuple):
    """The slots of a text, with the target's features."""

    layout: Layout  # a slot reads those before it in its document
    outputs: Array  # [B,T,D] the LSTM's
    carries: Array  # [B,T,2,2,D] the LSTM's, after each slot
    own: KVBlock  # keys and values


# The outputs [B,T,D] at each place of the newest block, the slots of each draft so far, and the
# LSTM's carry [B,T,2,2,D].
State = tuple[tuple[Array, ...], tuple[KVBlock, ...], Array]


class Blocks(NamedTuple):
    """The blocks that the slots of a text are divided into."""

    number: Array  # i32[B,T] of the slot's block in its row, from 0
    place: Array  # i32[B,T] of the slot in its block
    whole: Array  # bool[B,T] False: before the first whole block of its document


def training(net: Net, target: LM, plan: Plan, facts: tuple[tuple[str, Any], ...]) -> Training:
    """The training part of a drafter that grows its drafts as ``plan`` describes."""
    early = Bound(_along_text.among_first, net.shape.block - 1)
    return _along_text.training(
        Bound(loss, net, target),
        Bound(network.start, net.shape),
        Bound(along, net, target),
        plan,
        facts,
        early=early,
    )


def blocks_of(depth: Array, phase: Array, size: int) -> Blocks:
    """The blocks of slots at ``depth`` i32[B,T] of their documents.

    The first whole block of a document begins at slot phase[b], 0 to size - 1.
    """
    place = (depth + size - phase[:, None]) % size
    begins = (place == 0) | (depth == 0)
    return Blocks(jnp.cumsum(begins, 1) - 1, place, depth >= phase[:, None])


def relaxed(layout: Layout, blocks: Blocks) -> Layout:
    """The layout in which a slot reads its whole block and all before it in its document."""
    begin = (jnp.arange(layout.depth.shape[1]) - layout.depth)[..., None]
    same = begin == begin.swapaxes(1, 2)
    visible = blocks.number[:, :, None] >= blocks.number[:, None]
    return Layout(same & visible, layout.depth)


def glanced(blocks: Blocks, counted: Array, order: Array, runs: Array, count: Array) -> Array:
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
    return _depth_loss.first_free(free, rank * size + jnp.arange(size), count)


class LossKeys(declare.Keys, owner="loss."):
    """The keys of the loss."""

    feature: float = key(1.0, "weight of smooth L1 from the target's feature", least=0)
    weight: float = key(0.1, "weight of the next two terms", least=0)
    hard: float = key(
        0.1,
        "share of the cross-entropy with the token that the target prefers",
        least=0,
        most=1,
        needs="weight",
    )
    divergence: str = _depth_loss.divergence_key("weight")
    glancing: float = key(
        0.4,
        "the rate at the first step; at step e of ``run_steps`` it is glancing * (1 - e / "
        "run_steps); without ``Batch.step`` it does not fall",
        least=0,
        most=1,
    )
    noise: float = key(
        0.1, "uniform in [-noise, noise], added to all features that are read", least=0
    )
    dropout: float = key(
        0.1, "of the outputs of the first LSTM layer in the second pass", least=0, below=1
    )
    run_steps: int = key(0, "steps of the run")

    def check(self) -> None:
        """Raises UserError for values without effect."""
        if not (self.feature or self.weight):
            raise UserError("loss.feature and loss.weight are both 0; make one of them positive")
        if self.hard == 1:
            self.refuse(("divergence",), "where loss.hard is 1", "lower loss.hard, or leave it out")


@declare.method(LossKeys)
def loss(
    net: Net, target: LM, params: Any, target_params: Any, batch: Batch, key: Array, keys: LossKeys
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label, and metrics.

        feature * smooth L1 (beta 1, mean over the width) from the target's feature k tokens ahead
        + weight * ((1 - hard) * divergence from the target's distribution
                    + hard * cross-entropy with the token that the target prefers)

    Every slot has one label, at its place in a block. Metrics for each depth d from 1 to k:
    ``agreement_<d>`` and ``alpha_<d>``, the acceptance rates at temperature 0 and 1; ``glanced``,
    the share of labels whose slot was given its answer; ``scale`` and ``uniform`` as in
    ``_depth_loss``. As labels the target's logits and features are constants, as inputs they are
    not.

    Raises:
        UserError: values out of range, values without effect, a text that is too short.
    """
    why = f"a block of {net.shape.block} tokens is predicted from as many others"
    _along_text.check_length(batch, 2 * net.shape.block, why, ", or lower drafter.block")
    pair, random = ModelParams(target_params, params), jax.random.split(key, 4)
    batch = _along_text.of_output(target, batch)
    out = _along_text.output(target, target_params, batch)
    layout, rows = _along_text.layout_of(batch), len(batch.tokens)
    phase = jax.random.randint(random[0], (rows,), 0, net.shape.block)
    blocks = blocks_of(layout.depth, phase, net.shape.block)
    labels = _labels(net, jax.lax.stop_gradient(out), batch, blocks)
    inputs = slots_of(out.hidden, batch)
    shape, dtype, noise = inputs[1].shape, inputs[1].dtype, keys.noise
    added = jax.random.uniform(random[1], shape, dtype, -noise, noise) if noise else 0
    given = jnp.zeros_like(labels.counted)
    if keys.glancing:
        seen = jax.lax.stop_gradient((pair, inputs[0], inputs[1] + added))
        first = logits_of(net.ends, seen[0], forward(net, *seen, layout, blocks))
        rate = keys.glancing * (1 - _depth_loss.progress(batch, keys.run_steps))
        given = choose(random[2], blocks, labels, sampling.argmax(first), rate)
    tokens, features = answered(net, *inputs, given)
    kept, share = None, 1 - keys.dropout
    if keys.dropout:
        kept = jax.random.bernoulli(random[3], share, shape) / jnp.asarray(share, dtype)
    hidden = forward(net, pair, tokens, features + added, layout, blocks, kept)
    return _compare(net, pair, keys, labels, blocks, hidden, given)


class _Labels(NamedTuple):
    """What the slots are compared with."""

    features: Array  # [B,T,D] the target's, k tokens ahead
    logits: Array  # f[B,T,V]
    best: Array  # i32[B,T]
    counted: Array  # bool[B,T]


def _labels(net: Net, out: Output, batch: Batch, blocks: Blocks) -> _Labels:
    """Raises UserError for a batch whose labels belong to single depths of drafts."""
    _along_text.check_whole("falcon", batch)
    size = out.hidden.shape[1]
    hidden, logits = (ahead(x, net.shape.block, size) for x in (out.hidden, out.logits))
    counted = _along_text.label(batch.replace(output=None), net.shape.block + 1)[1]
    if batch.output is not None:
        # The pending token of a draft is the one after the last slot of its block.
        pending = jnp.arange(size) - blocks.place + net.shape.block
        counted &= pending >= batch.output[:, None]
    return _Labels(hidden, logits, sampling.argmax(logits), counted & blocks.whole)


def slots_of(features: Array, batch: Batch) -> tuple[Array, Array]:
    """What the slots read: tokens i32[B,T] and features [B,T,D]."""
    return ahead(batch.tokens, 1, features.shape[1]), features


def forward(
    net: Net,
    params: ModelParams,
    tokens: Array,
    features: Array,
    layout: Layout,
    blocks: Blocks,
    kept: Array | None = None,
) -> Array:
    """[B,T,D]: the network's output at all slots of a text, in these blocks."""
    none = network.no_carry(net, params, len(tokens))
    outputs, _ = network.recur(net, params, tokens, features, none, layout.depth == 0, kept)
    cache = network.no_text(net, params, len(tokens), 0).cache
    return network.predict(net, params, outputs, cache, relaxed(layout, blocks))[0]


def answered(net: Net, tokens: Array, features: Array, given: Array) -> tuple[Array, Array]:
    """What slots read, tokens and features: where ``given`` bool[B,T], what slot t + k reads."""
    token, feature = (ahead(x, net.shape.block, x.shape[1]) for x in (tokens, features))
    return jnp.where(given, token, tokens), jnp.where(given[..., None], feature, features)


def choose(key: Array, blocks: Blocks, labels: _Labels, predicted: Array, rate: Any) -> Array:
    """bool[B,T]: ``glanced`` slots, in every row ``rate`` times as many as are wrong there."""
    count = _depth_loss.given_count(labels.counted & (predicted != labels.best), rate)
    keys, shape = jax.random.split(key), blocks.number.shape
    longest = jnp.max(blocks.place)  # k - 1; a block of one slot is given as a whole
    runs = jax.random.randint(keys[0], shape, 1, jnp.maximum(longest, 1) + 1)
    return glanced(blocks, labels.counted, jax.random.uniform(keys[1], shape), runs, count)


def _compare(
    net: Net,
    params: ModelParams,
    keys: LossKeys,
    labels: _Labels,
    blocks: Blocks,
    hidden: Array,
    given: Array,
) -> tuple[Array, dict[str, Any]]:
    """The loss and its metrics."""
    counted, logits = labels.counted, logits_of(net.ends, params, hidden)

    def distance(logits: Array) -> Array:
        log_probs = jax.nn.log_softmax(logits)
        log_probs = jnp.broadcast_to(log_probs, labels.logits.shape)
        chosen = jnp.take_along_axis(log_probs, labels.best[..., None], -1)[..., 0]
        soft = DIVERGENCES[keys.divergence](labels.logits, logits)
        return (1 - keys.hard) * soft - keys.hard * chosen

    value = keys.feature * smooth_l1(hidden - labels.features) + keys.weight * distance(logits)
    # [V] only: XLA would fold a constant of the whole shape, slowly.
    guess = keys.weight * distance(jnp.zeros(logits.shape[-1], logits.dtype))
    metrics: dict[str, Any] = {
        "scale": jnp.float32(keys.feature + keys.weight),
        "uniform": mean(keys.feature * smooth_l1(labels.features) + guess, counted),
        "glanced": mean(given.astype(jnp.float32), counted),
    }
    weights: dict[str, Array] = dict.fromkeys(("loss", *metrics), counted.sum())
    same = sampling.argmax(logits) == labels.best
    shared = jax.lax.stop_gradient(overlap(labels.logits, logits))
    for place in range(net.shape.block):
        own = counted & (blocks.place == place)
        means = {f"agreement_{place + 1}": mean(same, own), f"alpha_{place + 1}": mean(shared, own)}
        metrics |= means
        weights |= dict.fromkeys(means, own.sum())
    return mean(value, counted), {**metrics, "weight": jax.tree.map(jnp.float32, weights)}


def along(net: Net, target: LM, params: ModelParams, batch: Batch, depth: int) -> Texts:
    """``_along_text.Along`` of the network: the drafts that begin with each token pending.

    The tokens of a draft are those of the text. Drafts at tokens that have no whole block of slots
    before them have no meaning.
    """
    out, layout = _along_text.output(target, params.target, batch), _along_text.layout_of(batch)
    none, inputs = network.no_carry(net, params, len(out.hidden)), slots_of(out.hidden, batch)
    outputs, carries = network.recur(net, params, *inputs, none, layout.depth == 0)
    text = Text(layout, outputs, carries, network.keys(net, params, outputs, layout.depth))

    def step(state: State, number: int) -> tuple[Array, State]:
        if number and number % net.shape.block == 0:
            state = _next(net, params, batch, text, number, state)
        return logits_of(net.ends, params, state[0][number % net.shape.block]), state

    state = _first(net, params, text), (), text.carries
    yield from Drafts(batch, out.logits, step, state).along(depth)


def _first(net: Net, params: ModelParams, text: Text) -> tuple[Array, ...]:
    """k arrays [B,T,D]: for each slot as the last one of a block, the output at each of its slots.

    Place i of the block that ends at slot s is slot s - k + 1 + i, and reads the slots up to s.
    """
    size, hidden = text.outputs.shape[1], []
    cache = network.no_text(net, params, len(text.outputs), 0).cache
    place = jnp.arange(size)
    begin = (place - text.layout.depth)[:, None]
    same = begin == begin.swapaxes(1, 2)
    for later in reversed(range(net.shape.block)):
        visible = same & (place <= place[:, None] + later)
        layout = Layout(visible, text.layout.depth)
        out = network.predict(net, params, text.outputs, cache, layout)[0]
        hidden.append(jnp.pad(out, ((0, 0), (later, 0), (0, 0)))[:, :size])
    return tuple(hidden)


def _next(
    net: Net, params: ModelParams, batch: Batch, text: Text, number: int, state: State
) -> State:
    """The block that begins at depth ``number``, after the text's tokens at the depths before it.

    ``state`` is that of the block before it; returns that of this block.
    """
    features, fed, carry = state
    (rows, size), width = text.outputs.shape[:2], net.shape.block
    fed_tokens = [ahead(batch.tokens, number - width + i + 2, size) for i in range(width)]
    tokens, estimated = jnp.stack(fed_tokens, 2), jnp.stack(features, 2)
    flat = [x.reshape(rows * size, *x.shape[2:]) for x in (tokens, estimated, carry)]
    outputs, carries = network.recur(net, params, *flat)
    outputs = outputs.reshape(rows, size, width, -1)
    depths = [text.layout.depth + 1 + number - width + i for i in range(width)]
    own = [network.keys(net, params, outputs[:, :, i], depths[i]) for i in range(width)]
    cache, hidden = network.no_text(net, params, rows, 0).cache, []
    for i in range(width):
        # The layout adds the slot itself; the others of its block are like earlier steps.
        others = [each for j, each in enumerate(own) if j != i]
        layout = Columns(text.layout.visible, depths[i])
        before = tree.join(text.own, *fed, *others)
        out, _ = network.predict(net, params, outputs[:, :, i], cache, layout, before)
        hidden.append(out)
    return tuple(hidden), (*fed, *own), carries[:, -1].reshape(carry.shape)
