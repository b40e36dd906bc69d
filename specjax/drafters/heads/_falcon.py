"""The drafter of Falcon's network: a block of k tokens in one pass, the next one after its path.

When a draft grows, the network has the slots of all committed tokens, with the target's features.
Their newest k slots predict the first block. The k tokens of a path through a block, with the
network's own estimates of their features, are the next k slots: one pass over them, with the LSTM's
carry of this path, predicts the block after it. Inside a block, a node's children have the block's
logits at their depth, whatever tokens were drawn before them in the block.

A verdict leaves the target's features of the pending token and the accepted nodes; the next round
begins by feeding these slots from the carry of the committed text. So neither the cache nor the
carry ever has anything of a draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.drafters import _growth
from specjax.drafters._growth import Begun, Nodes, Plan, Stepper
from specjax.drafters._growth.plans import DYNAMIC, Method
from specjax.drafters._keys import NetworkKeys
from specjax.drafters.heads import _falcon_network as network
from specjax.drafters.heads import _prefix
from specjax.drafters.heads._falcon_network import Committed, Net, Slots
from specjax.drafters.heads._given import Given
from specjax.errors import UserError
from specjax.tree import Layout
from specjax.types import LM, Context, Drafter, ModelParams, Output, Params, Training, Verdict

NAME = "falcon"
# The least depth of a dynamic tree without keys.
DEPTH = 6


class Kept(struct.PyTreeNode):
    """What the stepper keeps from round to round."""

    text: Committed
    # [B,M+1,D] the target's features of the slots that follow those of ``text``.
    features: jax.Array


class Memory(struct.PyTreeNode):
    """What the nodes below a fed node read: the block that predicts its children."""

    logits: jax.Array  # f[B,P,k,V]
    features: jax.Array  # [B,P,k,D] estimated
    tokens: jax.Array  # i32[B,P,k] of the path, from the first token of this block
    carry: jax.Array  # [B,P,2,2,D] the LSTM's, after the slots that predict the block
    # [B,P,k,H,head_dim] keys and values of these slots. They are read where the node is the last
    # one of its block, so that it was fed with them.
    k: jax.Array
    v: jax.Array
    output: jax.Array  # f32[B,P] as ``KVBlock.output``


def build(
    target: LM, net: Net, keys: NetworkKeys, given: Given, training: Callable[[Plan], Training]
) -> Drafter:
    """The drafter of a network; without keys, EAGLE-2's dynamic tree of 6 tokens or more.

    L1 with a rule that takes its siblings. Raises UserError for keys of a tree that do not fit.
    """
    usual = net.block * -(-DEPTH // net.block)
    method = Method(
        NAME,
        DYNAMIC,
        "top_k",
        target.vocab_size,
        accuracy=given.config.get("accuracy"),
        steps=usual,
    )
    plan = _growth.read(method, keys)
    _check_blocks(net.block, plan.growth.depth)
    stepper = Stepper(
        init=Bound(_init, net, plan.growth.depth),
        begin=Bound(_begin, net),
        step=Bound(_step, net),
        commit=Bound(_commit, net),
    )
    return _growth.build(
        NAME,
        stepper,
        plan,
        Bound(_init_params, given.params),
        training=training(plan),
        features=True,
    )


def _check_blocks(size: int, depth: int) -> None:
    """Raises UserError for a draft that ends inside a block."""
    if depth % size:
        below, above = depth // size * size, (depth // size + 1) * size
        right = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"the draft is {depth} tokens deep, and {NAME} drafts blocks of {size}; take a tree of "
            f"blocks, {right} tokens deep"
        )


def _init_params(params: Params, key: Any) -> Params:
    del key
    if params is None:
        raise UserError(
            f"{NAME} has no network yet; give model=, a directory of a trained one (mode train "
            "makes it)"
        )
    return params


def _init(
    net: Net,
    longest: int,
    params: ModelParams,
    context: Context,
    target_out: Output,
    slots: int,
) -> Kept:
    """Feeds all slots of the prompt."""
    batch, size = target_out.hidden.shape[:2]
    text = network.no_text(net, params, batch, slots)
    if size:
        inputs = context.tokens[:, 1 : 1 + size], target_out.hidden
        feed = Bound(_feed, net, params)
        text = _prefix.feed(feed, network.commit, inputs, context.length - 1, text)[1]
    width = net.shape.config.hidden_size
    return Kept(text, jnp.zeros((batch, longest + 1, width), text.recent.dtype))


def _feed(
    net: Net, params: ModelParams, inputs: tuple[jax.Array, jax.Array], text: Committed
) -> tuple[None, Slots]:
    return None, network.feed(net, params, *inputs, text)


def _begin(net: Net, params: ModelParams, context: Context, kept: Kept) -> Begun:
    """Feeds and commits the slots that the text lacks; the newest k predict the first block.

    A row that is finished lacks none after a further round, and a round then changes nothing. A row
    whose text has fewer than k + 1 tokens cannot draft.
    """
    length, width = kept.text.cache.length, kept.features.shape[1]
    missing = jnp.clip(context.length - 1 - length, 0, width)
    places = length[:, None] + 1 + jnp.arange(width)
    tokens = jnp.take_along_axis(context.tokens, places, axis=1, mode="clip")
    fed = network.feed(net, params, tokens, kept.features, kept.text)
    text = network.commit(kept.text, fed, missing)
    hidden = network.first_block(net, params, text)
    logits = network.logits(net, params, hidden)
    # The slots of the first block are in the cache.
    slots = jax.tree.map(lambda x: jnp.zeros_like(x[:, :1]), fed.own)
    k, v = (jnp.repeat(x[0][:, :, None], net.block, 2) for x in (slots.k, slots.v))
    empty = jnp.zeros((len(tokens), 1, net.block), jnp.int32)
    block = (logits[:, None], hidden[:, None], empty, text.carry[:, None], k, v)
    memory = Memory(*block, slots.output)
    return Begun(logits[:, 0], kept.replace(text=text), memory, text.cache.length >= net.block)


def _step(
    net: Net, params: ModelParams, kept: Kept, nodes: Nodes, block: Memory
) -> tuple[jax.Array, Memory]:
    """``Stepper.step``; the depth is static. The last nodes of a block are fed to the network."""
    size, depth = net.block, int(nodes.depth)
    above: Memory = _growth.at(block, nodes.parents)
    tokens = above.tokens.at[:, :, (depth - 1) % size].set(nodes.tokens)
    if depth % size:
        return above.logits[:, :, depth % size], above.replace(tokens=tokens)
    rows, count = tokens.shape[:2]

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(rows * count, *x.shape[2:])

    def each(x: jax.Array) -> jax.Array:
        return x.reshape(rows, count, *x.shape[1:])

    given = (flat(tokens), flat(above.features), flat(above.carry))
    outputs, carries = network.recur(net, params, *given)
    before = block_slots(block, block.tokens.shape[1])
    layout = block_layout(nodes.layout, size)
    hidden, own = network.predict(
        net, params, outputs.reshape(rows, count * size, -1), kept.text.cache, layout, before
    )
    hidden = hidden.reshape(rows, count, size, -1)
    logits = network.logits(net, params, hidden)
    k, v = (x.reshape(rows, count, size, *x.shape[2:]) for x in (own.k[0], own.v[0]))
    memory = Memory(
        logits,
        hidden,
        jnp.zeros_like(tokens),
        each(carries[:, -1]),
        k,
        v,
        own.output.reshape(rows, count, size).sum(-1),
    )
    return logits[:, :, 0], memory


def block_slots(block: Memory, places: int) -> KVBlock:
    """The keys and values at P places, of k slots each: [B,P*k,...]."""
    size = block.k.shape[2]

    def slots(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], places * size, *x.shape[3:])

    return KVBlock((slots(block.k),), (slots(block.v),), jnp.repeat(block.output, size, 1))


def block_layout(layout: Layout, size: int) -> Layout:
    """The layout of slots, ``size`` for each node, of the layout of nodes.

    A node has the slots that its block was fed as; a slot reads its own whole block, and those of
    the nodes above that are the last ones of a block.
    """
    last = (layout.depth > 0) & (layout.depth % size == 0)
    visible = layout.visible & last[:, None]
    visible = jnp.repeat(jnp.repeat(visible, size, 1), size, 2)
    first = jnp.maximum(layout.depth - size, 0)
    depth = first[..., None] + jnp.arange(size, dtype=first.dtype)
    return Layout(visible, depth.reshape(len(depth), -1))


def _commit(
    net: Net,
    params: ModelParams,
    kept: Kept,
    drafted: None,
    verdict: Verdict,
    target_out: Output,
) -> Kept:
    """Keeps the target's features of the pending token and the accepted nodes."""
    fed = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    inside = jnp.arange(fed.shape[1]) < verdict.count[:, None]
    features = tree.take(target_out.hidden, fed, inside).astype(kept.features.dtype)
    features = tree.sized(features, kept.features.shape[1])
    alive = (verdict.count > 0)[:, None, None]
    return kept.replace(features=jnp.where(alive, features, kept.features))
