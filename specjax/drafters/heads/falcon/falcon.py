"""Falcon: EAGLE with blocks, so that one pass of the draft network gives several tokens.

Gao et al. 2024 (2412.12639). Two LSTM layers read [embedding of token t + 1 ; feature of token t];
a decoder layer with a relaxed causal mask, in which a place sees its whole block of k places,
estimates the feature k tokens ahead. The target's embedding and LM head are shared. One pass over
the newest k places gives the next k tokens, and the pass after it reads the path through them: a
draft of m k tokens costs m passes.

The tokens of a block are drawn independently of each other, so they are less often right than
EAGLE's; the next block depends on them. Without keys the draft is EAGLE-2's dynamic tree; trees and
chains are a multiple of k deep. Siblings "top_k" and dynamic trees are deterministic: L1 with
"deterministic", "match" and other rules for such drafts. Drafts sampled from the network's
probabilities are L1 with "chain", "recursive" and their variants.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax import declare, tree
from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.drafters import files, growth
from specjax.drafters.files.codec import Codec, Rule, Rules
from specjax.drafters.files.decoder_layers import WITHOUT_NORM, decoder_layer
from specjax.drafters.growth import Begun, Nodes, Stepper
from specjax.drafters.growth.plans import DYNAMIC, Method
from specjax.drafters.heads import _prefix, _shape
from specjax.drafters.heads.eagle._network import layer_facts
from specjax.drafters.heads.eagle._network import logits as logits_of
from specjax.drafters.heads.falcon import _loss
from specjax.drafters.heads.falcon import _network as network
from specjax.drafters.heads.falcon._network import Committed, FalconShape, Net, Slots
from specjax.drafters.shared_keys import NetworkKeys, stored_size
from specjax.errors import TooLong, UserError
from specjax.models.layers import dtype_of
from specjax.tree import Layout
from specjax.types import LM, Array, Context, Drafter, ModelParams, Output, Verdict

REFERENCE = "gao2024falcon"

NAME = "falcon"
# k of a new network: the best one of the paper.
BLOCK = 2
# The least depth of a dynamic tree without keys.
DEPTH = 6


class Keys(NetworkKeys):
    """The keys of ``falcon``."""

    block: int = stored_size(
        "k, the tokens of one pass; 0: as in the files, or 2. Parameters without files do not "
        "show it.",
        fact="block_size",
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with a Falcon network.

    Raises:
        UserError: files without a network or of another target, sizes or a block that differ from
            the files, a tree that does not fit or is not a multiple of k deep.
    """
    given, keys = files.read(NAME, target, keys)
    if given.config and given.config.get("block_size") is None:
        raise UserError(
            f"config.json of the {NAME} network lacks block_size; add the tokens of one"
        )
    config = _shape.config_of(NAME, target, given, keys)
    shape = FalconShape(config, keys.block or BLOCK)
    _shape.check(NAME, given, _shape.leaves_of(Bound(network.start, shape)))
    net = Net(shape, given.ends, dtype_of(given.params))
    facts = (*layer_facts(config), *files.facts(Keys, shape))
    steps = shape.block * -(-DEPTH // shape.block)
    accuracy = given.config.get("accuracy")
    method = Method(NAME, DYNAMIC, "top_k", target.vocab_size, accuracy=accuracy, steps=steps)
    plan = growth.read(method, keys)
    _check_blocks(shape.block, plan.growth.depth)
    stepper = Stepper(
        init=Bound(_init, net, plan.growth.depth),
        begin=Bound(_begin, net),
        step=Bound(_step, net),
        commit=Bound(_commit, net),
    )
    own, training = given.init_params(NAME), _loss.training(net, target, plan, facts)
    return growth.build(NAME, stepper, plan, own, training=training, features=True)


def _check_blocks(size: int, depth: int) -> None:
    """Raises UserError for a draft that ends inside a block."""
    if depth % size:
        below, above = depth // size * size, (depth // size + 1) * size
        right = f"{below} or {above}" if below else f"{above}"
        raise TooLong(
            f"the draft is {depth} tokens deep, and {NAME} drafts blocks of {size}; take a tree of "
            f"blocks, {right} tokens deep"
        )


# When a draft grows, the network has the slots of all committed tokens, with the target's features.
# Their newest k slots predict the first block. The k tokens of a path through a block, with the
# network's own estimates of their features, are the next k slots: one pass over them, with the
# LSTM's carry of this path, predicts the block after it. Inside a block, a node's children have the
# block's logits at their depth, whatever tokens were drawn before them in the block.
#
# A verdict leaves the target's features of the pending token and the accepted nodes; the next round
# begins by feeding these slots from the carry of the committed text. So neither the cache nor the
# carry ever has anything of a draft.


class Kept(struct.PyTreeNode):
    """What the stepper keeps from round to round."""

    text: Committed
    # [B,M+1,D] the target's features of the slots that follow those of ``text``.
    features: Array


class Memory(struct.PyTreeNode):
    """What the nodes below a fed node read: the block that predicts its children."""

    logits: Array  # f[B,P,k,V]
    features: Array  # [B,P,k,D] estimated
    tokens: Array  # i32[B,P,k] of the path, from the first token of this block
    carry: Array  # [B,P,2,2,D] the LSTM's, after the slots that predict the block
    # [B,P,k,H,head_dim] keys and values of these slots. They are read where the node is the last
    # one of its block, so that it was fed with them.
    k: Array
    v: Array
    output: Array  # f32[B,P] as ``KVBlock.output``


def _init(
    net: Net, longest: int, params: ModelParams, context: Context, out: Output, slots: int
) -> Kept:
    """Feeds all slots of the prompt."""
    batch, size = out.hidden.shape[:2]
    text = network.no_text(net, params, batch, slots)
    if size:
        inputs = context.tokens[:, 1 : 1 + size], out.hidden
        feed = Bound(_feed, net, params)
        text = _prefix.feed(feed, network.commit, inputs, context.length - 1, text)[1]
    width = net.shape.config.hidden_size
    return Kept(text, jnp.zeros((batch, longest + 1, width), text.recent.dtype))


def _feed(
    net: Net, params: ModelParams, inputs: tuple[Array, Array], text: Committed
) -> tuple[None, Slots]:
    return None, network.feed(net, params, *inputs, text)


def _begin(net: Net, params: ModelParams, context: Context, kept: Kept) -> Begun:
    """Feeds and commits the slots that the text lacks; the newest k predict the first block.

    A row that is finished lacks none after a further round, and a round then changes nothing. A row
    whose text has fewer than k + 1 tokens cannot draft.
    """
    lacks = context.tokens, context.length - 1, kept.text.cache.length, kept.features.shape[1]
    missing, tokens = growth.lacking(*lacks, shift=1)
    fed = network.feed(net, params, tokens, kept.features, kept.text)
    text = network.commit(kept.text, fed, missing)
    hidden = network.first_block(net, params, text)
    logits = logits_of(net.ends, params, hidden)
    # The slots of the first block are in the cache.
    slots = jax.tree.map(lambda x: jnp.zeros_like(x[:, :1]), fed.own)
    k, v = (jnp.repeat(x[0][:, :, None], net.shape.block, 2) for x in (slots.k, slots.v))
    empty = jnp.zeros((len(tokens), 1, net.shape.block), jnp.int32)
    block = (logits[:, None], hidden[:, None], empty, text.carry[:, None], k, v)
    first, ready = logits[:, 0], text.cache.length >= net.shape.block
    return Begun(first, kept.replace(text=text), Memory(*block, slots.output), ready)


def _step(
    net: Net, params: ModelParams, kept: Kept, nodes: Nodes, block: Memory
) -> tuple[Array, Memory]:
    """``Stepper.step``; the depth is static. The last nodes of a block are fed to the network."""
    size, depth = net.shape.block, int(nodes.depth)
    above: Memory = growth.at(block, nodes.parents)
    tokens = above.tokens.at[:, :, (depth - 1) % size].set(nodes.tokens)
    if depth % size:
        return above.logits[:, :, depth % size], above.replace(tokens=tokens)
    rows, count = tokens.shape[:2]
    given = (tokens, above.features, above.carry)
    flat = [x.reshape(rows * count, *x.shape[2:]) for x in given]
    outputs, carries = network.recur(net, params, *flat)
    before, layout = block_slots(block), block_layout(nodes.layout, size)
    outputs = outputs.reshape(rows, count * size, -1)
    hidden, own = network.predict(net, params, outputs, kept.text.cache, layout, before)
    hidden = hidden.reshape(rows, count, size, -1)
    logits = logits_of(net.ends, params, hidden)
    k, v = (x.reshape(rows, count, size, *x.shape[2:]) for x in (own.k[0], own.v[0]))
    empty, carry = jnp.zeros_like(tokens), carries[:, -1].reshape(above.carry.shape)
    output = own.output.reshape(rows, count, size).sum(-1)
    return logits[:, :, 0], Memory(logits, hidden, empty, carry, k, v, output)


def block_slots(block: Memory) -> KVBlock:
    """The keys and values at P places, of k slots each: [B,P*k,...]."""
    k, v = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (block.k, block.v))
    return KVBlock((k,), (v,), jnp.repeat(block.output, block.k.shape[2], 1))


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
    net: Net, params: ModelParams, kept: Kept, drafted: None, verdict: Verdict, out: Output
) -> Kept:
    """Keeps the target's features of the pending token and the accepted nodes."""
    features = growth.fed_to_target(out.hidden, verdict).astype(kept.features.dtype)
    features = tree.sized(features, kept.features.shape[1])
    alive = (verdict.count > 0)[:, None, None]
    return kept.replace(features=jnp.where(alive, features, kept.features))


def _rules() -> Rules:
    """EAGLE-1's names of a decoder layer, and those that torch gives the parameters of an LSTM."""
    rules = decoder_layer("layers.0.", "layers.0.", WITHOUT_NORM, biases={})
    for layer, read in ((0, "2D"), (1, "D")):
        for part, name, dims in (("input", "ih", f"{read} 4D"), ("hidden", "hh", "D 4D")):
            place = f"lstm.{layer}.{part}"
            weight = Rule(f"lstm.weight_{name}_l{layer}", f"{place}.kernel", dims, True)
            rules += (weight, Rule(f"lstm.bias_{name}_l{layer}", f"{place}.bias", "4D"))
    return rules


class _Files(Codec):
    # The model_type "falcon" is that of a language model.
    types = ("falcon_drafter",)
    tables: ClassVar = {"": _rules()}


CODEC = _Files(NAME)
