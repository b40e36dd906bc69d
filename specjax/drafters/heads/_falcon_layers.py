"""The modules of Falcon's draft network: two LSTM layers, then a decoder layer.

Falcon (2412.12639, section 3.2): the LSTM reads [embedding of token t + 1 ; feature of token t] and
gives the width of a feature. The decoder layer is EAGLE's first one, without a norm before its
attention. Its keys and values depend on the LSTM's output at their own slot alone.

Parameters: {lstm: {"0", "1": {input, hidden: {kernel, bias}}}, layers: {"0": the decoder layer}}.
The gates are in torch's order: input, forget, cell, output.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.cache import KVBlock
from specjax.drafters.heads._eagle_layers import _Layer, _Net
from specjax.models import rope
from specjax.models.short_blocks import matmul
from specjax.models.transformer_config import TransformerConfig
from specjax.types import Params

LAYERS = 2  # of the LSTM


@dataclasses.dataclass(frozen=True)
class FalconShape:
    """The static facts of the network."""

    config: TransformerConfig  # of the decoder layer; ``hidden_size`` is the target's width D
    block: int  # k, tokens of one forward pass


class FalconLayer(_Net):
    """The decoder layer."""

    def __init__(self, shape: FalconShape, dtype, rngs: nnx.Rngs):
        config = shape.config
        super().__init__(_Layer(config, dtype, rngs, first=True), config, dtype, rngs)

    def keys(self, x: jax.Array, angle: jax.Array | None) -> KVBlock:
        """[B,T,D] -> the keys and values of T slots, as those of ``run``."""
        own = self.layers["0"].attention
        shape = (*x.shape[:2], own.kv_heads, own.width)
        k, v = own.k(x).reshape(shape), own.v(x).reshape(shape)
        k = own.k_norm(k) if own.qk_norm == "head" else k
        if angle is not None and own.rope is not None:
            k = rope.rotate(k, angle, own.rope)
        return KVBlock((k,), (v,), x[..., 0].astype(jnp.float32))


@functools.cache
def abstract(shape: FalconShape, dtype: Any) -> tuple[Any, Any]:
    """(graph, state) of the decoder layer, without arrays."""
    return nnx.split(nnx.eval_shape(lambda: FalconLayer(shape, dtype, nnx.Rngs(0))))


def merge(shape: FalconShape, params: Params, dtype: Any) -> FalconLayer:
    """The module with these parameters (inside a traced function, free at run time)."""
    graph, state = abstract(shape, jnp.dtype(dtype))
    # A copy: tracers must not be written into the cached state.
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, {"layers": params["layers"]})
    return nnx.merge(graph, state)


def lstm_shapes(width: int) -> dict[str, Any]:
    """The shapes of the LSTM's parameters, a nested dict."""

    def linear(read: int) -> dict[str, tuple[int, ...]]:
        return {"kernel": (read, 4 * width), "bias": (4 * width,)}

    return {
        str(layer): {"input": linear(width if layer else 2 * width), "hidden": linear(width)}
        for layer in range(LAYERS)
    }


def new(shape: FalconShape, key: jax.Array) -> Params:
    """Random parameters: the LSTM's uniform in 1 / sqrt(D) (torch), others as EAGLE's."""
    width, keys = shape.config.hidden_size, jax.random.split(key, 2)
    sizes, tree = jax.tree.flatten(lstm_shapes(width), is_leaf=lambda x: isinstance(x, tuple))
    bound, each = width**-0.5, jax.random.split(keys[0], len(sizes))
    drawn = [
        jax.random.uniform(own, size, jnp.float32, -bound, bound)
        for own, size in zip(each, sizes, strict=True)
    ]
    layer = nnx.to_pure_dict(nnx.state(FalconLayer(shape, jnp.float32, nnx.Rngs(keys[1]))))
    return {"lstm": jax.tree.unflatten(tree, drawn), **layer}


def lstm(
    params: Params,
    x: jax.Array,
    carry: jax.Array,
    begins: jax.Array | None = None,
    kept: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
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


def _lstm_layer(
    own: Params, x: jax.Array, carry: jax.Array, begins: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """[B,T,E] -> (outputs [B,T,D], outputs and cells [B,T,2,D])."""
    reads, again = own["input"], own["hidden"]
    # One product for all slots; only the recurrent one is inside the loop.
    gates = matmul(x, reads["kernel"]) + reads["bias"] + again["bias"]
    first = jnp.zeros(gates.shape[:2], bool) if begins is None else begins

    def slot(state: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
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
