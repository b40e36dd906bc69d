"""The drafter of a block network: one pass for all depths, then a correction token by token.

The cache has the target's taps of the committed text as keys and values. A verdict leaves the taps
of the pending token and the accepted nodes, and ``commit`` appends them: the cache never holds what
was computed for a draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as kv
from specjax import tree
from specjax.bound import Bound
from specjax.drafters import _growth
from specjax.drafters._growth import Begun, Nodes, Plan, Stepper
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import StackedKeys
from specjax.drafters.heads import _block_network as network
from specjax.drafters.heads import _prefix, _vocabulary
from specjax.drafters.heads._block_corrections import Given as Before
from specjax.drafters.heads._block_network import Net
from specjax.drafters.heads._given import Given
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import LM, Context, Drafter, ModelParams, Output, Params, Training, Verdict

NAME = "block_head"


class Block(struct.PyTreeNode):
    """What a round's pass over the block leaves for all depths."""

    logits: jax.Array  # f[B,K,V] without a correction
    hidden: jax.Array  # [B,K,D]


class Memory(struct.PyTreeNode):
    """What the children of nodes read."""

    state: jax.Array  # [B,P,S] of the correction
    confidence: jax.Array | None  # f32[B,P] that the next token is accepted


def build(
    target: LM,
    net: Net,
    keys: StackedKeys,
    given: Given,
    training: Callable[[Net, Plan], Training],
) -> Drafter:
    """The drafter of a network; without keys, a sampled chain of full length.

    L1 with a rule that takes its siblings. Raises UserError for keys that do not fit.
    """
    shape = net.shape
    if keys.gamma is not None and keys.gamma > shape.positions:
        raise UserError(
            f"gamma is {keys.gamma}, and the block was trained to draft {shape.positions} tokens; "
            f"give at most {shape.positions}, or train a larger block"
        )
    independent = shape.correction == "none"
    chain = shapes.chain(shape.positions)
    accuracy = given.config.get("accuracy")
    method = Method(NAME, chain, "iid", shape.drafted, shape.positions, independent, accuracy)
    plan = _growth.read(method, keys)
    stepper = Stepper(
        init=Bound(_init, net),
        begin=Bound(_begin, net, plan.growth.depth),
        step=Bound(_step, net),
        commit=Bound(_commit, net),
        looped=True,
        independent=independent,
        lazy=True,
        confidence=_confidence if shape.confidence else None,
    )
    drafter = _growth.build(
        NAME,
        stepper,
        plan,
        Bound(_init_params, given.params),
        training=training(net, plan),
        features=True,
    )
    return drafter._replace(taps=shape.taps)


def _init_params(params: Params, key: Any) -> Params:
    del key
    if params is None:
        raise UserError(
            "block_head has no network yet; give model=, a directory of a trained one (mode train "
            "makes it)"
        )
    return params


def _init(
    net: Net, params: ModelParams, context: Context, target_out: Output, slots: int
) -> kv.KVCache:
    batch, size = target_out.hidden.shape[:2]
    cache = network.init_cache(net, batch, slots)
    if not size:
        return cache
    feed = Bound(_feed, net, params)
    return _prefix.feed(feed, kv.commit, target_out.taps, context.length - 1, cache)[1]


def _feed(
    net: Net, params: ModelParams, taps: tuple[jax.Array, ...], cache: kv.KVCache
) -> tuple[None, kv.KVBlock]:
    positions = cache.length[:, None] + jnp.arange(taps[0].shape[1])
    return None, network.read(net, params, taps, positions)


def _begin(net: Net, depth: int, params: ModelParams, context: Context, cache: kv.KVCache) -> Begun:
    """``Stepper.begin``: one pass over the block of ``depth`` tokens.

    A row whose text has one token cannot draft: there are no taps to read.
    """
    hidden = network.draft(net, params, context.pending, depth, cache)
    block = Block(network.logits(net, params, hidden), hidden)
    state = network.no_state(net, params, len(hidden), 1)
    first, memory = _depth(net, params, block, state, context.pending[:, None], 0)
    return Begun(first[:, 0], cache, memory, cache.length > 0, reads=block)


def _step(
    net: Net, params: ModelParams, block: Block, nodes: Nodes, above: Memory
) -> tuple[jax.Array, Memory]:
    """``Stepper.step``: the memory of a node is the correction's state after its token."""
    state = _growth.at(above.state, nodes.parents)
    state = jnp.broadcast_to(state, (*nodes.tokens.shape, state.shape[-1]))
    return _depth(net, params, block, state, nodes.tokens, nodes.depth)


def _depth(
    net: Net, params: ModelParams, block: Block, state: jax.Array, tokens: jax.Array, depth: Any
) -> tuple[jax.Array, Memory]:
    """The logits f[B,n,V] after n nodes, ``depth`` tokens after the pending one; their memory."""

    def at_nodes(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, depth][:, None], (*tokens.shape, x.shape[-1]))

    before = Before(tokens, at_nodes(block.hidden), at_nodes(block.logits), depth)
    after = network.correct(net, params, state, before)
    logits = _vocabulary.spread(net.ids, after.logits, net.shape.vocab)
    sure = after.confidence
    return logits, Memory(after.state, None if sure is None else jax.nn.sigmoid(sure))


def _confidence(memory: Memory) -> jax.Array:
    """``Stepper.confidence``."""
    assert memory.confidence is not None
    return memory.confidence


def _commit(
    net: Net,
    params: ModelParams,
    cache: kv.KVCache,
    drafted: None,
    verdict: Verdict,
    target_out: Output,
) -> kv.KVCache:
    """Appends the pending token and the accepted nodes, without the newest token."""
    fed = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    inside = jnp.arange(fed.shape[1]) < verdict.count[:, None]
    taps = tree.take(target_out.taps, fed, inside)
    return kv.commit(cache, _feed(net, params, taps, cache)[1], verdict.count)
