"""Falcon's draft network as pure functions: for committed text, for a block, and new parameters.

Slot t has token t + 1 and the feature of token t; its output is an estimate of the feature of token
t + k, which the target's LM head turns into logits of token t + k + 1. An LSTM carries what earlier
slots read. In the decoder layer a slot attends to its whole block of k slots and to all blocks
before it. So one pass over the newest k slots predicts the k tokens after the pending one, each
from all of the committed text.

Blocks are anchored at the pending token: its slot is the last one of a block. In a text it may be
any slot, so a block may begin at any slot. The keys and values of a slot do not depend on this: the
only decoder layer reads the LSTM's outputs, which are causal. So a cache serves every anchor.

Parameters: {lstm: {"0", "1": {input, hidden: {kernel, bias}}}, layers: {"0": the decoder layer}}.
The gates are in torch's order: input, forget, cell, output. The decoder layer is EAGLE's first one,
without a norm before its attention.

All functions take ``Net`` first, and ``params`` is always the pair ``ModelParams``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct

from specjax import cache as kv
from specjax.cache import KVBlock, KVCache
from specjax.drafters.files import Ends
from specjax.drafters.heads import _prefix
from specjax.drafters.heads.eagle._network import Layer, Layers
from specjax.models.attention import past, rope_angle
from specjax.models.layers import Module, at_least, matmul
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Columns, Layout
from specjax.types import Array, ModelParams, Params

LAYERS = 2  # of the LSTM


@dataclasses.dataclass(frozen=True)
class FalconShape:
    """The static facts of the network."""

    config: TransformerConfig  # of the decoder layer; ``hidden_size`` is the target's width D
    block: int  # k, tokens of one forward pass


def _decoder_layer(shape: FalconShape, dtype: Any, rngs: nnx.Rngs) -> Layers:
    return Layers(Layer(shape.config, dtype, rngs, first=True), shape.config, dtype, rngs)


LAYER = Module(_decoder_layer)


class Net(NamedTuple):
    """The static facts."""

    shape: FalconShape
    ends: Ends
    dtype: Any  # of parameters, activations and cache


class Committed(struct.PyTreeNode):
    """What the slots of the committed text leave; all of them read the target's features."""

    cache: KVCache
    carry: Array  # [B,2,2,D] the LSTM's, after the newest slot, in float32 at least
    recent: Array  # [B,k,D] the LSTM's outputs at the newest k slots; zeros before the text


class Slots(struct.PyTreeNode):
    """What was computed for T slots after a text."""

    own: KVBlock  # keys and values
    outputs: Array  # [B,T,D] the LSTM's
    carries: Array  # [B,T,2,2,D] the LSTM's, after each slot


def no_carry(net: Net, params: ModelParams, batch: int) -> Array:
    """[B,2,2,D]: the LSTM's carry before a text, in float32 at least."""
    width, dtype = net.shape.config.hidden_size, dtype_of(net, params)
    return jnp.zeros((batch, LAYERS, 2, width), jnp.promote_types(dtype, jnp.float32))


def no_text(net: Net, params: ModelParams, batch: int, slots: int) -> Committed:
    """A text without slots, with room for ``slots``."""
    config, dtype = net.shape.config, dtype_of(net, params)
    cache = _prefix.init_cache(config, net.dtype, 1, batch, slots)
    recent = jnp.zeros((batch, net.shape.block, config.hidden_size), dtype)
    return Committed(cache, no_carry(net, params, batch), recent)


def recur(
    net: Net,
    params: ModelParams,
    tokens: Array,
    features: Array,
    carry: Array,
    begins: Array | None = None,
    kept: Array | None = None,
) -> tuple[Array, Array]:
    """tokens i32[B,T] and features [B,T,D] of slots -> ``lstm``."""
    dtype = dtype_of(net, params)
    embedded = net.ends.embed(params.target, tokens).astype(dtype)
    x = jnp.concatenate([embedded, features.astype(dtype)], -1)
    return lstm(params.draft["lstm"], x, carry, begins, kept)


def keys(net: Net, params: ModelParams, outputs: Array, positions: Array) -> KVBlock:
    """The keys and values of slots with these outputs [B,T,D], at ``positions`` i32[B,T]."""
    angle, attention = (
        rope_angle(net.shape.config, positions),
        _layer(net, params).layers["0"].attention,
    )
    k, v = (attention.part(part, outputs, angle) for part in ("k", "v"))
    return KVBlock((k,), (v,), outputs[..., 0].astype(jnp.float32))


def feed(net: Net, params: ModelParams, tokens: Array, features: Array, before: Committed) -> Slots:
    """The T slots that follow the committed ones, with the target's features [B,T,D]."""
    outputs, carries = recur(net, params, tokens, features, before.carry)
    positions = before.cache.length[:, None] + jnp.arange(tokens.shape[1])
    return Slots(keys(net, params, outputs, positions), outputs, carries)


def commit(before: Committed, slots: Slots, count: Array) -> Committed:
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
    outputs: Array,
    cache: KVCache,
    layout: Layout | Columns,
    block: KVBlock | None = None,
) -> tuple[Array, KVBlock]:
    """The decoder layer at slots with these outputs [B,T,D]: [B,T,D], their keys and values."""
    view = past(cache, outputs.shape[1], layout, 0 if block is None else block.size)
    angle, module = rope_angle(net.shape.config, view.positions), _layer(net, params)
    return module.run(outputs, angle, view, cache, block)


def first_block(net: Net, params: ModelParams, text: Committed) -> Array:
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


def start(shape: FalconShape, target_params: Params, key: Array) -> Params:
    """New parameters: the LSTM's uniform in 1 / sqrt(D) (torch), others as EAGLE's."""
    width, keys = shape.config.hidden_size, jax.random.split(key, 2)

    def linear(read: int) -> dict[str, tuple[int, ...]]:
        return {"kernel": (read, 4 * width), "bias": (4 * width,)}

    shapes = {
        str(layer): {"input": linear(width if layer else 2 * width), "hidden": linear(width)}
        for layer in range(LAYERS)
    }
    sizes, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    bound = width**-0.5
    drawn = [
        jax.random.uniform(leaf_key, size, jnp.float32, -bound, bound)
        for leaf_key, size in zip(jax.random.split(keys[0], len(sizes)), sizes, strict=True)
    ]
    return {"lstm": jax.tree.unflatten(tree, drawn), **LAYER.new(shape, keys[1])}


def dtype_of(net: Net, params: ModelParams) -> Any:
    """The dtype of activations."""
    return at_least(net.dtype, params.draft)


def _layer(net: Net, params: ModelParams) -> Layers:
    return LAYER.merge(net.shape, params.draft, net.dtype)


def lstm(
    params: Params, x: Array, carry: Array, begins: Array | None = None, kept: Array | None = None
) -> tuple[Array, Array]:
    """x [B,T,2D] -> (outputs [B,T,D], the carry after each slot [B,T,2,2,D]).

    ``carry`` [B,2,2,D] has for each layer the output and the cell. ``begins`` bool[B,T]: slots
    before which both are set to zeros. ``kept`` [B,T,D] is multiplied with the first layer's
    outputs (dropout). Outputs have the dtype of x and carries that of ``carry``: a cell adds up
    small numbers along a whole text.
    """
    states = []
    for layer in range(LAYERS):
        x, state = _lstm_layer(params[str(layer)], x, carry[:, layer], begins)
        states.append(state)
        if kept is not None and layer < LAYERS - 1:
            x = x * kept
    return x, jnp.stack(states, 2)


def _lstm_layer(own: Params, x: Array, carry: Array, begins: Array | None) -> tuple[Array, Array]:
    """[B,T,E] -> (outputs [B,T,D], outputs and cells [B,T,2,D])."""
    reads, again = own["input"], own["hidden"]
    # One product for all slots; only the recurrent one is inside the loop.
    gates = matmul(x, reads["kernel"]) + reads["bias"] + again["bias"]
    first = jnp.zeros(gates.shape[:2], bool) if begins is None else begins

    def slot(state: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
        gate, first = given
        if begins is not None:
            state = jnp.where(first[:, None, None], 0, state)
        gate = gate + matmul(state[:, 0].astype(gate.dtype), again["kernel"])
        take, keep, cell, show = jnp.split(gate.astype(state.dtype), 4, -1)
        cell = jax.nn.sigmoid(keep) * state[:, 1] + jax.nn.sigmoid(take) * jnp.tanh(cell)
        state = jnp.stack([jax.nn.sigmoid(show) * jnp.tanh(cell), cell], 1)
        return state, state

    states = jax.lax.scan(slot, carry, (gates.swapaxes(0, 1), first.swapaxes(0, 1)))[1]
    states = states.swapaxes(0, 1)
    return states[:, :, 0].astype(x.dtype), states
