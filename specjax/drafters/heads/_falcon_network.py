"""Falcon's draft network as pure functions: for committed text, for a block, and new parameters.

Slot t has token t + 1 and the feature of token t; its output is an estimate of the feature of token
t + k, which the target's LM head turns into logits of token t + k + 1. An LSTM carries what earlier
slots read. In the decoder layer a slot attends to its whole block of k slots and to all blocks
before it. So one pass over the newest k slots predicts the k tokens after the pending one, each
from all of the committed text.

Blocks are anchored at the pending token: its slot is the last one of a block. In a text it may be
any slot, so a block may begin at any slot. The keys and values of a slot do not depend on this: the
only decoder layer reads the LSTM's outputs, which are causal. So a cache serves every anchor.

All functions take ``Net`` first, and ``params`` is always the pair ``ModelParams``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as kv
from specjax.drafters.heads import _falcon_layers as layers
from specjax.drafters.heads._falcon_layers import FalconShape
from specjax.drafters.heads._family import Ends
from specjax.models.attention import past, rope_angle
from specjax.models.logits import in_float32
from specjax.tree import Columns, Layout
from specjax.types import ModelParams, Params


class Net(NamedTuple):
    """The static facts."""

    shape: FalconShape
    ends: Ends
    dtype: Any  # of parameters, activations and cache

    @property
    def block(self) -> int:
        """k."""
        return self.shape.block


class Committed(struct.PyTreeNode):
    """What the slots of the committed text leave; all of them read the target's features."""

    cache: kv.KVCache
    carry: jax.Array  # [B,2,2,D] the LSTM's, after the newest slot, in float32 at least
    recent: jax.Array  # [B,k,D] the LSTM's outputs at the newest k slots; zeros before the text


class Slots(struct.PyTreeNode):
    """What was computed for T slots after a text."""

    own: kv.KVBlock  # keys and values
    outputs: jax.Array  # [B,T,D] the LSTM's
    carries: jax.Array  # [B,T,2,2,D] the LSTM's, after each slot


def no_carry(net: Net, params: ModelParams, batch: int) -> jax.Array:
    """[B,2,2,D]: the LSTM's carry before a text, in float32 at least."""
    width, dtype = net.shape.config.hidden_size, dtype_of(net, params)
    return jnp.zeros((batch, layers.LAYERS, 2, width), jnp.promote_types(dtype, jnp.float32))


def no_text(net: Net, params: ModelParams, batch: int, slots: int) -> Committed:
    """A text without slots, with room for ``slots``."""
    config, dtype = net.shape.config, dtype_of(net, params)
    cache = kv.zeros(1, batch, config.num_kv_heads, slots, config.head_dim, net.dtype)
    recent = jnp.zeros((batch, net.block, config.hidden_size), dtype)
    return Committed(cache, no_carry(net, params, batch), recent)


def recur(
    net: Net,
    params: ModelParams,
    tokens: jax.Array,
    features: jax.Array,
    carry: jax.Array,
    begins: jax.Array | None = None,
    kept: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """tokens i32[B,T] and features [B,T,D] of slots -> ``_falcon_layers.lstm``."""
    dtype = dtype_of(net, params)
    embedded = net.ends.embed(params.target, tokens).astype(dtype)
    x = jnp.concatenate([embedded, features.astype(dtype)], -1)
    return layers.lstm(params.draft["lstm"], x, carry, begins, kept)


def keys(net: Net, params: ModelParams, outputs: jax.Array, positions: jax.Array) -> kv.KVBlock:
    """The keys and values of slots with these outputs [B,T,D], at ``positions`` i32[B,T]."""
    angle = rope_angle(net.shape.config, positions)
    return layers.merge(net.shape, params.draft, dtype_of(net, params)).keys(outputs, angle)


def feed(
    net: Net, params: ModelParams, tokens: jax.Array, features: jax.Array, before: Committed
) -> Slots:
    """The T slots that follow the committed ones, with the target's features [B,T,D]."""
    outputs, carries = recur(net, params, tokens, features, before.carry)
    positions = before.cache.length[:, None] + jnp.arange(tokens.shape[1])
    return Slots(keys(net, params, outputs, positions), outputs, carries)


def commit(before: Committed, slots: Slots, count: jax.Array) -> Committed:
    """Appends the first count[b] slots; the others leave nothing."""
    at = jax.vmap(lambda row, index: row[index])
    carries = jnp.concatenate([before.carry[:, None], slots.carries], 1)
    outputs = jnp.concatenate([before.recent, slots.outputs], 1)
    newest = count[:, None] + jnp.arange(before.recent.shape[1])
    cache = kv.commit(before.cache, slots.own, count)
    return Committed(cache, at(carries, count), at(outputs, newest))


def predict(
    net: Net,
    params: ModelParams,
    outputs: jax.Array,
    cache: kv.KVCache,
    layout: Layout | Columns,
    block: kv.KVBlock | None = None,
) -> tuple[jax.Array, kv.KVBlock]:
    """The decoder layer at slots with these outputs [B,T,D]: [B,T,D], their keys and values."""
    fed = 0 if block is None else block.size
    view = past(cache, outputs.shape[1], layout, fed)
    module = layers.merge(net.shape, params.draft, dtype_of(net, params))
    return module.run(outputs, rope_angle(net.shape.config, view.positions), view, cache, block)


def first_block(net: Net, params: ModelParams, text: Committed) -> jax.Array:
    """[B,k,D]: the estimated features of the pending token and the k - 1 tokens after it.

    The text must have k slots.
    """
    batch, size = text.recent.shape[:2]
    # The newest k slots are the block; their stored keys and values are not read.
    before = text.cache.replace(length=jnp.maximum(text.cache.length - size, 0))
    layout = Layout(
        jnp.ones((batch, size, size), bool),
        jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size)),
    )
    return predict(net, params, text.recent, before, layout)[0]


def logits(net: Net, params: ModelParams, hidden: jax.Array) -> jax.Array:
    """[...,D] -> f[...,V], in float32 at least."""
    return in_float32(net.ends.unembed(params.target, hidden))


def start(shape: FalconShape, target_params: Params, key: jax.Array) -> Params:
    """New parameters; none of them is the target's."""
    del target_params
    return layers.new(shape, key)


def dtype_of(net: Net, params: ModelParams) -> Any:
    """The dtype, or float64 for parameters of float64 (exactness tests)."""
    own = params.draft["lstm"]["0"]["input"]["kernel"].dtype
    return own if own == jnp.float64 else net.dtype
