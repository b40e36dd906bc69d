"""From a Flax module to the pure functions of ``types.LM``: the one place that splits and merges modules
(``drafters/_prefix.py`` does the same for a single layer).

Parameters travel as a plain nested dict: dispatching 288 leaves takes a fraction of a millisecond that way.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.errors import UserError
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.types import LM, Output


@functools.cache
def _abstract(config: TransformerConfig, dtype) -> tuple[Any, Any]:
    module = nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))
    return nnx.split(module)


def abstract_params(config: TransformerConfig, dtype=jnp.float32) -> dict:
    """The parameters' shapes and dtypes, as a plain dict of ``jax.ShapeDtypeStruct``; nothing is allocated."""
    return nnx.to_pure_dict(_abstract(config, jnp.dtype(dtype))[1])


def init_params(config: TransformerConfig, key: jax.Array, dtype=jnp.float32) -> dict:
    """Random parameters (normal, 0.02) as a plain dict."""

    @jax.jit
    def build(key):
        return nnx.to_pure_dict(
            nnx.state(Transformer(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(key)))
        )

    return build(key)


def merge(config: TransformerConfig, params: dict, dtype=jnp.float32) -> Transformer:
    """The module with these parameters (inside a traced function this costs nothing at run time)."""
    graph, state = _abstract(config, jnp.dtype(dtype))
    # A state built anew: replacing in place would write tracers into the cached one.
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


@functools.cache
def from_config(
    config: TransformerConfig,
    dtype=jnp.float32,
    taps: tuple[int, ...] = (),
    name: str = "lm",
    remat: bool = False,
) -> LM:
    """The decoder of ``config`` as an ``LM``; equal arguments give the same object, so nothing is compiled twice.

    ``taps`` are layer numbers whose output hidden states a drafter wants in ``Output.taps``. ``remat`` recomputes each layer
    in the backward pass of training instead of keeping what is inside it.
    """
    dtype = jnp.dtype(dtype)
    if any(not 0 <= tap < config.num_layers for tap in taps):
        raise UserError(f"taps are {taps}; layers are numbered 0..{config.num_layers - 1}")

    def init_cache(batch: int, slots: int) -> kv.KVCache:
        return kv.zeros(
            config.num_layers, batch, config.num_kv_heads, slots, config.head_dim, dtype
        )

    def apply(params, tokens, cache, parents=None):
        module = merge(config, params, dtype)
        hidden, tapped, cache = module(tokens, cache, parents, taps, remat)
        return Output(module.logits(hidden), hidden, tapped), cache

    def embed(params, tokens):
        return merge(config, params, dtype).embed(jnp.clip(tokens, 0, config.vocab_size - 1))

    def unembed(params, hidden):
        return merge(config, params, dtype).logits(hidden)

    return LM(
        init_cache,
        apply,
        kv.commit,
        config.vocab_size,
        config.max_positions,
        name=name,
        width=config.hidden_size,
        embed=embed,
        unembed=unembed,
    )


def forward(model: LM, params: Any, tokens: jax.Array, segments: jax.Array | None = None) -> Output:
    """Scores whole sequences at once: tokens i32[B,T] -> ``Output`` over all T (training, scoring, tests).

    With ``segments`` i32[B,T] a row holds several documents one after the other: attention and positions stay inside each.
    """
    parents = None if segments is None else documents(segments)
    return model.apply(params, tokens, model.init_cache(*tokens.shape), parents)[0]


def documents(segments: jax.Array) -> jax.Array:
    """i32[B,T]: each token's predecessor, -1 where a document begins; to attention, documents are chains in one tree."""
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jnp.where(begins, -1, jnp.arange(segments.shape[1]) - 1)
