"""Falcon's network along a text: the blocks of training, and the drafts at every place.

Slot t has token t + 1 and the feature of token t (``_falcon_network``). In training a row of text
is divided into blocks of k slots. While decoding the last slot of a block is that of the pending
token, wherever this is in the text; so the first whole block of a training row begins at one of the
first k slots, chosen at random: every slot is trained as every place of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import tree
from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.drafters import _foresee
from specjax.drafters._growth import Plan
from specjax.drafters.heads import _falcon_loss, _text
from specjax.drafters.heads import _falcon_network as network
from specjax.drafters.heads._falcon_network import Net
from specjax.tree import Columns, Layout
from specjax.types import LM, Batch, ModelParams, Training


class Text(NamedTuple):
    """The slots of a text, with the target's features."""

    layout: Layout  # a slot reads those before it in its document
    outputs: jax.Array  # [B,T,D] the LSTM's
    carries: jax.Array  # [B,T,2,2,D] the LSTM's, after each slot
    own: KVBlock  # keys and values


def training(net: Net, target: LM, plan: Plan, facts: tuple[tuple[str, Any], ...]) -> Training:
    """The training part of a drafter that grows its drafts as ``plan`` describes."""
    texts = Bound(along, net, target)
    foresee = _text.foresee(texts, plan)
    ranks = Bound(_text.ranks, texts, plan.growth.depth)
    return Training(
        loss=Bound(_falcon_loss.loss, net, target),
        start=Bound(network.start, net.shape),
        foresee=foresee and Bound(_where_drafted, net, foresee, 0),
        ranks=Bound(_where_drafted, net, ranks, -1),
        facts=facts,
    )


def _where_drafted(
    net: Net,
    values: Callable[..., jax.Array],
    none: int,
    params: ModelParams,
    batch: Batch,
    *more: Any,
) -> jax.Array:
    """[B,T,M]: the values, and ``none`` where the text has no whole block of slots."""
    early = _falcon_loss.layout_of(batch).depth < net.block - 1
    early = _foresee.of_pending(early[..., None])
    own = values(params, batch, *more)
    return jnp.where(early, jnp.asarray(none, own.dtype), own)


def along(net: Net, target: LM, params: ModelParams, batch: Batch, depth: int) -> _text.Texts:
    """``_text.Along`` of the network: the drafts that begin with each token pending.

    The tokens of a draft are those of the text. Drafts at tokens that have no whole block of slots
    before them have no meaning.
    """
    out = _text.output(target, params.target, batch)
    text, size = read(net, params, out.hidden, batch), out.hidden.shape[1]
    hidden, fed, carry = _first(net, params, text), (), text.carries
    for number in range(depth):
        if number and number % net.block == 0:
            hidden, fed, carry = _next(net, params, batch, text, number, hidden, fed, carry)
        logits = network.logits(net, params, hidden[number % net.block])
        labels = _text.label(batch, number + 2)[0]
        yield labels, logits, _text.ahead(out.logits, number + 1, size)


def read(net: Net, params: ModelParams, features: jax.Array, batch: Batch) -> Text:
    """The slots of a batch, with features [B,T,D]."""
    rows, size = features.shape[:2]
    layout = _falcon_loss.layout_of(batch)
    tokens = _text.ahead(batch.tokens, 1, size)
    none = network.no_carry(net, params, rows)
    outputs, carries = network.recur(net, params, tokens, features, none, layout.depth == 0)
    return Text(layout, outputs, carries, network.keys(net, params, outputs, layout.depth))


def _first(net: Net, params: ModelParams, text: Text) -> tuple[jax.Array, ...]:
    """k arrays [B,T,D]: for each slot as the last one of a block, the output at each of its slots.

    Place i of the block that ends at slot s is slot s - k + 1 + i, and reads the slots up to s.
    """
    size, hidden = text.outputs.shape[1], []
    cache = network.no_text(net, params, len(text.outputs), 0).cache
    place = jnp.arange(size)
    begin = (place - text.layout.depth)[:, None]
    same = begin == begin.swapaxes(1, 2)
    for ahead in reversed(range(net.block)):
        visible = same & (place <= place[:, None] + ahead)
        layout = Layout(visible, text.layout.depth)
        out = network.predict(net, params, text.outputs, cache, layout)[0]
        hidden.append(jnp.pad(out, ((0, 0), (ahead, 0), (0, 0)))[:, :size])
    return tuple(hidden)


def _next(
    net: Net,
    params: ModelParams,
    batch: Batch,
    text: Text,
    number: int,
    features: tuple[jax.Array, ...],
    fed: tuple[KVBlock, ...],
    carry: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[KVBlock, ...], jax.Array]:
    """The block that begins at depth ``number``, after the text's tokens at the depths before it.

    ``features`` are the outputs for the block before it, ``fed`` the slots of each draft so far,
    ``carry`` [B,T,2,2,D] the LSTM's. Returns the same for this block.
    """
    (rows, size), width = text.outputs.shape[:2], net.block
    ahead = [_text.ahead(batch.tokens, number - width + i + 2, size) for i in range(width)]
    tokens, estimated = jnp.stack(ahead, 2), jnp.stack(features, 2)
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
    carry = carries[:, -1].reshape(carry.shape)
    return tuple(hidden), (*fed, *own), carry
