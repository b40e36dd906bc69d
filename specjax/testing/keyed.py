"""A table model with keys and values, for drafters that read a part of the target's cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax import tree
from specjax.cache import KVBlock, KVCache, Queries
from specjax.types import LM, Output

# A key is (weight, position): sums of weights are exact in float32.
WIDTH = 2


@functools.cache
def keyed(vocab_size: int, name: str = "keyed") -> LM:
    """A table, indexed by a sum over the cached tokens and by the last token.

    The params are those of ``tabular``: logits f32[V+1,V,V]. Each token has a key with a weight
    that depends on the token and on its position. The first index is the sum of the weights of all
    tokens that are attended to, modulo V + 1, so a model that reads a part of the cache has other
    logits. The order of the slots does not matter.
    """
    return LM(
        _init_cache, _apply, kv.commit, vocab_size, name=name, width=vocab_size, queries=_queries
    )


def _init_cache(batch: int, slots: int) -> KVCache:
    return kv.zeros(1, batch, 1, slots, WIDTH, jnp.float32)


def _keys(tokens: jax.Array, position: jax.Array) -> jax.Array:
    """f32[B,T,1,2]."""
    weight = 2 * jnp.maximum(tokens, 0) + position**2 + 1
    return jnp.stack([weight, position], -1).astype(jnp.float32)[:, :, None]


def _apply(table, tokens, cache, layout=None, block=None):
    (batch, size), vocab = tokens.shape, table.shape[-1]
    fed = 0 if block is None else block.output.shape[1]
    if layout is None:
        layout = tree.chain_layout(batch, size, fed)
    position = cache.length[:, None] + layout.depth[:, fed:]
    key = _keys(tokens, position)
    own = KVBlock((key,), (key,), jnp.zeros(tokens.shape, jnp.float32))
    whole = own if block is None else tree.join(block, own)
    inside = jnp.where(layout.visible, whole.k[0][:, None, :, 0, 0], 0).sum(-1)
    held = cache.length if cache.held is None else cache.held
    used = jnp.arange(cache.k[0].shape[2]) < held[:, None]
    outside = jnp.where(used, cache.v[0][:, 0, :, 0], 0).sum(-1)
    index = (inside + outside[:, None]).astype(jnp.int32) % (vocab + 1)
    logits = table[index, jnp.clip(tokens, 0, vocab - 1)]
    # The sum depends on all reads of the cache, as ``KVBlock.output`` must.
    return Output(logits, logits), own.replace(output=index.astype(jnp.float32))


def _queries(table, tokens, cache):
    position = cache.length[:, None] + jnp.arange(tokens.shape[1])
    angle = (tokens + 2 * position).astype(jnp.float32)
    return (Queries(jnp.stack([jnp.sin(angle), jnp.cos(angle)], -1)[:, :, None]),)
