"""Small models for tests: tiny decoders, and tables of logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import cache as kv
from specjax import tree
from specjax.cache import KVBlock, KVCache, Queries
from specjax.errors import UserError
from specjax.models import families, lm
from specjax.models.t5_config import t5
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM, Inside, LowerLayers, Output, Sublayers


def tiny_config(
    family: str = "llama", vocab_size: int = 32, layers: int = 2, width: int = 32
) -> TransformerConfig:
    """A decoder small enough to compile in a second.

    It has grouped-query attention, unless the family cannot have it (GPT-2, GPT-NeoX).
    """
    return families.shape(
        family,
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2 if "num_kv_heads" in families.FAMILIES[family].keys else 4,
        head_dim=width // 4,
        max_positions=128,
    )


def tiny(
    family: str = "llama", seed: int = 0, scale: float = 8.0, dtype=jnp.float32, **shape
) -> tuple[LM, dict]:
    """A random tiny decoder and its params; ``shape`` are arguments of ``tiny_config``.

    ``scale`` multiplies the weight matrices, so that its probabilities are far from uniform;
    ``dtype`` is that of parameters, activations and cache.
    """
    config = tiny_config(family, **shape)
    params = lm.init_params(config, jax.random.key(seed), dtype)
    return lm.from_config(config, dtype), _scaled(params, scale)


def tiny_t5(seed: int = 0, scale: float = 20.0, dtype=jnp.float32, **fields) -> tuple[LM, dict]:
    """A random tiny encoder-decoder model and its params; its decoder begins with token 0.

    ``fields`` are those of ``T5Config``; ``scale`` as in ``tiny``; ``dtype`` of the activations.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "head_dim": 8}
    sizes |= {"vocab_size": 32, "num_layers": 2, "buckets": 8, "max_distance": 12}
    config = t5(**sizes | {"start_token_id": 0} | fields)
    params = lm.init_params(config, jax.random.key(seed))
    return lm.from_config(config, dtype), _scaled(params, scale)


def _scaled(params: Any, scale: float) -> Any:
    """The parameters with their matrices multiplied."""
    return jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)


def prompts_of(target: LM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts for the target, of the same lengths: with an encoder, their last token is its start.

    A prompt of one token gets a second one, and a prompt with a source and the start token is not
    changed.
    """
    if target.encoder is None:
        return [list(prompt) for prompt in prompts]
    start = target.encoder.start
    others = [token for token in range(target.vocab_size) if token != start]

    def one(prompt: Sequence[int]) -> list[int]:
        if start in prompt[1:] and prompt[0] != start:
            return list(prompt)
        return [*(others[token % len(others)] for token in prompt[:-1] or prompt), start]

    return [one(list(prompt)) for prompt in prompts]


class TabularCache(struct.PyTreeNode):
    """The committed text, one entry per token."""

    length: jax.Array  # i32[B]
    entries: jax.Array  # i32[B,S] the tokens

    def read(self, vocab: int, tokens, layout, block) -> tuple[jax.Array, jax.Array]:
        """The first index of each token's logits, and the entries of the tokens."""
        stored = jnp.concatenate([block, tokens], 1)
        # The token before each one: in the block the visible one that is one position earlier.
        own = layout.depth[:, -tokens.shape[1] :]
        above = layout.visible & (layout.depth[:, None] == own[..., None] - 1)
        inside = jnp.take_along_axis(stored, jnp.argmax(above, -1), 1)
        last = jnp.maximum(self.length - 1, 0)[:, None]
        committed = jnp.take_along_axis(self.entries, last, 1) if self.entries.shape[1] else last
        outside = jnp.where(self.length[:, None] > 0, committed, vocab)
        return jnp.clip(jnp.where(above.any(-1), inside, outside), 0, vocab), tokens


class HashCache(TabularCache):
    """Its entry is a hash of the token, of its position and of all tokens before it."""

    def read(self, vocab: int, tokens, layout, block) -> tuple[jax.Array, jax.Array]:
        """The first index of each token's logits, and the entries of the tokens."""
        first = block.shape[1]
        committed = jnp.arange(self.entries.shape[1]) < self.length[:, None]
        text = jnp.where(committed, self.entries, 0).sum(-1)
        position = self.length[:, None] + layout.depth[:, first:]

        # A token reads the entries of its ancestors, so they are made one after another.
        def one(index, entries):
            seen = jnp.where(layout.visible[:, index], entries, 0).sum(-1) + text
            entry = _mix(seen % PRIME, tokens[:, index], position[:, index])
            return entries.at[:, first + index].set(entry)

        entries = jnp.concatenate([block, jnp.zeros(tokens.shape, jnp.int32)], 1)
        entries = jax.lax.fori_loop(0, tokens.shape[1], one, entries)
        total = jnp.where(layout.visible, entries[:, None], 0).sum(-1) + text[:, None]
        return total % PRIME % (vocab + 1), entries[:, first:]


# How many layers of a table can be tapped: the tap of layer i is its hidden vector, rotated by i.
LAYERS = 3


@functools.cache
def tapped(missing: int, layers: tuple[int, ...]) -> Callable:
    """``LM.apply`` of a part that lacks so many sublayers, with taps of the whole table model."""
    if any(not 0 <= layer < LAYERS for layer in layers):
        raise UserError(f"taps are {layers}; layers are numbered 0..{LAYERS - 1}")

    def with_taps(*args):
        out, block = _score(*args)
        taps = tuple(jnp.roll(out.hidden, i, -1) for i in layers)
        logits = jnp.roll(out.logits, missing, -1) if missing else out.logits
        return Output(logits, logits, taps), block

    return with_taps


def _score(table, tokens, cache, layout=None, block=None) -> tuple[Output, jax.Array]:
    batch, size = tokens.shape
    if block is None:
        block = jnp.zeros((batch, 0), jnp.int32)
    if layout is None:
        layout = tree.chain_layout(batch, size, block.shape[1])
    index, entries = cache.read(table.shape[-1], tokens, layout, block)
    logits = table[index, jnp.clip(tokens, 0, table.shape[-1] - 1)]
    return Output(logits, logits), entries


def _extended(pair, tokens, cache, layout=None, block=None):
    """``Inside.extended`` of a table: a row is added to the logits of the last token."""
    table, rows = pair
    out, block = _score(table, tokens, cache, layout, block)
    own = tokens - table.shape[-1]
    more = rows[jnp.clip(own, 0, len(rows) - 1)]
    logits = out.logits + jnp.where((own >= 0)[..., None], more, 0)
    return Output(logits, logits), block


def above(layers: tuple[int, ...]) -> Callable[..., tuple[Output, Any]]:
    """``Inside.above`` of a table."""
    return functools.partial(_go_on, layers)


def _go_on(
    layers: tuple[int, ...], pair: tuple[jax.Array, LowerLayers], tokens, cache, layout=None
) -> tuple[Output, Any]:
    """A pass in which the logits of the first tokens come from the hidden states of a part.

    The other tokens read the part's block, and so does a commit.
    """
    table, known = pair
    size, done = tokens.shape[1], known.hidden.shape[1]
    logits, block = known.hidden[:, :size], known.block[:, :size]
    # The output of a layer is the hidden vector, rotated by its number.
    logits = jnp.roll(logits, 1 - known.count, -1)
    if size > done:
        later = None if layout is None else layout.replace(visible=layout.visible[:, done:])
        out, more = _score(table, tokens[:, done:], cache, later, known.block)
        logits, block = tree.join((logits, block), (out.logits, more))
    taps = tuple(jnp.roll(logits, layer, -1) for layer in layers)
    return Output(logits, logits, taps), block


@functools.cache
def part(vocab_size: int, name: str, sublayers: Sublayers) -> LM:
    """``Inside.part`` of a table: its logits, rolled by the number of sublayers left out."""
    for layers in sublayers:
        if any(not 0 <= layer < LAYERS for layer in layers):
            raise UserError(f"sublayers {layers} are asked for; give numbers 0..{LAYERS - 1}")
    missing = 2 * LAYERS - len(sublayers.attention) - len(sublayers.mlp)
    taps = functools.partial(tapped, missing)
    return tabular(vocab_size, name)._replace(apply=taps(()), tapping=taps)


@functools.cache
def tabular(vocab_size: int, name: str = "tabular") -> LM:
    """A model that is a table: its params are logits f32[V+1,V,V], indexed by the last two tokens.

    Index V of the first axis: there is no earlier token. The model has a cache and takes chains and
    trees. Its law is known, so the outputs of a decode loop can be checked exactly. Its logits
    depend on the cache alone, so a wrong commit changes the output.
    """
    # The hidden vector is the logits and the head is the identity, so drafters with heads work too.
    model = LM(_init_cache, _score, _commit, vocab_size, name=name, width=vocab_size, layers=LAYERS)
    inside = Inside(functools.partial(part, vocab_size, name), extended=_extended, above=above)
    taps = functools.partial(tapped, 0)
    return model._replace(embed=_embed, unembed=_unembed, tapping=taps, inside=inside)


def _init_cache(batch: int, slots: int) -> TabularCache:
    return TabularCache(jnp.zeros((batch,), jnp.int32), jnp.full((batch, slots), -1, jnp.int32))


def _commit(cache, block, count, path=None):
    new, kept = tree.accepted(block, count, path)
    slot = cache.length[:, None] + jnp.arange(kept.shape[1])
    place = jnp.where(kept, slot, cache.entries.shape[1])
    rows = jnp.arange(len(kept))[:, None]
    entries = cache.entries.at[rows, place].set(new, mode="drop")
    return cache.replace(entries=entries, length=cache.length + count)


def _embed(table, tokens):
    return jax.nn.one_hot(tokens, table.shape[-1], dtype=table.dtype)


def _unembed(table, hidden):
    return hidden


def random_table(
    seed: int, vocab_size: int, sharpness: float = 1.5, *, sparse: bool = False
) -> jax.Array:
    """Params for ``tabular``: logits f[V+1,V,V], float64 where x64 is enabled.

    ``sparse``: in half of the contexts one token has probability 0.
    """
    shape = (vocab_size + 1, vocab_size, vocab_size)
    logits = sharpness * np.random.default_rng(seed).normal(size=shape)
    if sparse:
        rng = np.random.default_rng(seed)
        for context in np.ndindex(logits.shape[:2]):
            if rng.random() < 0.5:
                logits[(*context, rng.integers(vocab_size))] = -np.inf
    return jnp.asarray(logits)


# A key is (weight, position): sums of weights are exact in float32.
KEY_WIDTH = 2


@functools.cache
def keyed(vocab_size: int, name: str = "keyed") -> LM:
    """A table, indexed by a sum over the cached tokens and by the last token.

    The params are those of ``tabular``: logits f32[V+1,V,V]. Each token has a key with a weight
    that depends on the token and on its position. The first index is the sum of the weights of all
    tokens that are attended to, modulo V + 1, so a model that reads a part of the cache has other
    logits. The order of the slots does not matter.
    """
    return LM(
        _keyed_cache,
        _keyed_apply,
        kv.commit,
        vocab_size,
        name=name,
        width=vocab_size,
        inside=Inside(queries=_queries),
    )


def _keyed_cache(batch: int, slots: int) -> KVCache:
    return kv.zeros(1, batch, 1, slots, KEY_WIDTH, jnp.float32)


def _keys(tokens: jax.Array, position: jax.Array) -> jax.Array:
    """f32[B,T,1,2]."""
    weight = 2 * jnp.maximum(tokens, 0) + position**2 + 1
    return jnp.stack([weight, position], -1).astype(jnp.float32)[:, :, None]


def _keyed_apply(table, tokens, cache, layout=None, block=None):
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


# Values of a hash: a prime, so that multiplying by less than it is a permutation.
PRIME = 8191


def whole_text(table_model: LM) -> LM:
    """The model of the same table, indexed by a hash of the whole text and by the last token.

    The params are those of ``tabular``: logits f32[V+1,V,V]. Each cache entry is a hash of its
    token, its position and the entries before it; the first index is a hash of all entries. So a
    wrong entry anywhere, or one at a wrong place, changes all later outputs. Such an error is seen
    by comparing texts.
    """
    return table_model._replace(init_cache=_hash_cache)


def is_table(model: LM) -> bool:
    """Whether it is a ``tabular`` model."""
    return model.apply is _score and model.init_cache is _init_cache


def _hash_cache(batch: int, slots: int) -> HashCache:
    return HashCache(jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, slots), jnp.int32))


def _mix(text: jax.Array, token: jax.Array, position: jax.Array) -> jax.Array:
    """i32[B] in 1..PRIME-1, from numbers below PRIME."""
    x = (31 * text + 977 * jnp.maximum(token, 0) + 127 * position + 59) % PRIME
    x = (x * x + 7 * x + 11 * text) % PRIME
    return jnp.maximum(x, 1).astype(jnp.int32)
