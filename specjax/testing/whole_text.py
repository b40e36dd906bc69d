"""A table model whose output depends on every entry of its cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.testing import models
from specjax.types import LM, Output

# Values of a hash: a prime, so that multiplying by less than it is a permutation.
PRIME = 8191


class HashCache(struct.PyTreeNode):
    """One number per committed token, as a decoder keeps keys and values."""

    length: jax.Array  # i32[B]
    # i32[B,S] a hash of the token, of its position and of all tokens before it
    entries: jax.Array

    def score(self, table, tokens, layout=None, block=None) -> tuple[Output, jax.Array]:
        """``LM.apply`` of a table after this text; see ``TabularCache.score``."""
        return _apply(table, tokens, self, layout, block)


def whole_text(table_model: LM) -> LM:
    """The model of the same table, indexed by a hash of the whole text and by the last token.

    The params are those of ``tabular``: logits f32[V+1,V,V]. Each cache entry is a hash of its
    token, its position and the entries before it; the first index is a hash of all entries. So a
    wrong entry anywhere, or one at a wrong place, changes all later outputs. Such an error is seen
    by comparing texts.
    """
    return table_model._replace(
        init_cache=_init_cache, apply=_apply, commit=_commit, tapping=TAPPING
    )


def is_table(model: LM) -> bool:
    """Whether it is a ``tabular`` model."""
    return model.apply is models.tabular(1).apply


def _init_cache(batch: int, slots: int) -> HashCache:
    return HashCache(jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, slots), jnp.int32))


def _apply(table, tokens, cache, layout=None, block=None):
    (batch, size), vocab = tokens.shape, table.shape[-1]
    fed = jnp.zeros((batch, 0), jnp.int32) if block is None else block
    first = fed.shape[1]
    if layout is None:
        layout = tree.chain_layout(batch, size, first)
    committed = jnp.arange(cache.entries.shape[1]) < cache.length[:, None]
    text = jnp.where(committed, cache.entries, 0).sum(-1)
    position = cache.length[:, None] + layout.depth[:, first:]
    entries = jnp.concatenate([fed, jnp.zeros((batch, size), jnp.int32)], 1)

    # A token reads the entries of its ancestors, so they are made one after another.
    def one(index, entries):
        seen = jnp.where(layout.visible[:, index], entries, 0).sum(-1) + text
        entry = _mix(seen % PRIME, tokens[:, index], position[:, index])
        return entries.at[:, first + index].set(entry)

    entries = jax.lax.fori_loop(0, size, one, entries)
    total = jnp.where(layout.visible, entries[:, None], 0).sum(-1) + text[:, None]
    logits = table[total % PRIME % (vocab + 1), jnp.clip(tokens, 0, vocab - 1)]
    return Output(logits, logits), entries[:, first:]


TAPPING = models.tapping(_apply)


def _mix(text: jax.Array, token: jax.Array, position: jax.Array) -> jax.Array:
    """i32[B] in 1..PRIME-1, from numbers below PRIME."""
    x = (31 * text + 977 * jnp.maximum(token, 0) + 127 * position + 59) % PRIME
    x = (x * x + 7 * x + 11 * text) % PRIME
    return jnp.maximum(x, 1).astype(jnp.int32)


def _commit(cache, block, count, path=None):
    if path is None:
        path = jnp.broadcast_to(jnp.arange(block.shape[1]), block.shape)
    kept = jnp.arange(path.shape[1]) < count[:, None]
    slot = cache.length[:, None] + jnp.arange(path.shape[1])
    place = jnp.where(kept, slot, cache.entries.shape[1])
    rows = jnp.arange(path.shape[0])[:, None]
    entries = cache.entries.at[rows, place].set(tree.take(block, path, kept), mode="drop")
    return cache.replace(entries=entries, length=cache.length + count)
