"""T5 as the pure functions of ``types.LM``, with its encoder."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import cache as kv
from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.errors import UserError
from specjax.models.t5 import T5, SourceCache
from specjax.models.t5_config import T5Config
from specjax.tree import Layout
from specjax.types import LM, Encoder, Output


@functools.cache
def abstract(config: T5Config, dtype: np.dtype) -> tuple[Any, Any]:
    """The module's graph and the shapes of its parameters."""
    return nnx.split(nnx.eval_shape(lambda: T5(config, dtype=dtype, rngs=nnx.Rngs(0))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_params(config: T5Config, dtype: np.dtype, key: jax.Array) -> dict:
    """Random parameters (normal, standard deviation 0.02) as a plain dict."""
    return nnx.to_pure_dict(nnx.state(T5(config, dtype=dtype, rngs=nnx.Rngs(key))))


def merge(config: T5Config, dtype: np.dtype, params: dict) -> T5:
    """The module with these parameters."""
    graph, state = abstract(config, dtype)
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


@functools.cache
def from_config(
    config: T5Config, dtype: np.dtype, taps: tuple[int, ...], name: str, remat: bool
) -> LM:
    """The model of ``config`` as an ``LM``; the arguments are those of ``lm.from_config``.

    Taps are layers of the decoder. Raises UserError for a configuration without a start token.
    """
    config.check_taps(taps)
    start = config.start_token_id
    if start is None or start >= config.vocab_size:
        raise UserError(
            f"decoder_start_token_id is {'missing' if start is None else start}; the decoder of an "
            f"encoder-decoder model begins with a token of 0..{config.vocab_size - 1} (T5: that of "
            "pad_token_id)"
        )
    own = (config, dtype)
    return LM(
        Bound(_init_cache, *own),
        Bound(_apply, *own, taps, remat),
        kv.commit,
        config.vocab_size,
        name=name,
        width=config.hidden_size,
        embed=lambda params, tokens: merge(*own, params).embedded(tokens),
        unembed=lambda params, hidden: merge(*own, params).logits(hidden),
        layers=config.num_layers,
        tapping=lambda layers: from_config(*own, tuple(layers), name, remat).apply,
        last_norm=lambda params, hidden: merge(*own, params).norm(hidden),
        encoder=Encoder(start, Bound(_read, *own, remat), config),
    )


def _init_cache(config: T5Config, dtype: np.dtype, batch: int, slots: int) -> SourceCache:
    empty = kv.zeros(config.num_layers, batch, config.num_heads, slots, config.head_dim, dtype)
    return SourceCache(empty.k, empty.v, empty.length, source=jnp.zeros_like(empty.length))


def _apply(
    config: T5Config,
    dtype: np.dtype,
    taps: tuple[int, ...],
    remat: bool,
    params: dict,
    tokens: jax.Array,
    cache: SourceCache,
    layout: Layout | None = None,
    block: KVBlock | None = None,
) -> tuple[Output, KVBlock]:
    """``LM.apply``."""
    module = merge(config, dtype, params)
    hidden, tapped, new = module(tokens, cache, layout, block, taps, remat)
    return Output(module.logits(hidden), hidden, tapped), new


def _read(
    config: T5Config,
    dtype: np.dtype,
    remat: bool,
    params: dict,
    tokens: jax.Array,
    count: jax.Array,
    cache: SourceCache,
) -> tuple[Output, SourceCache]:
    """``Encoder.read``: the keys and values of the source become the first slots of the cache."""
    memory, block = merge(config, dtype, params).read(tokens, count, remat)
    filled: Any = kv.commit(cache, block, count)
    logits = jnp.zeros((tokens.shape[0], 0, config.vocab_size))
    return Output(logits, memory), filled.replace(source=jnp.asarray(count, jnp.int32))
