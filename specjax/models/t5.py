"""T5: an encoder that reads the source text, and a decoder that writes.

The text of a row is the source, the decoder's start token, and what was written (see
``types.Encoder``). So the cache of a decoder layer has one slot for each token of the text: those
of the source have the keys and values of the cross-attention, those after it the keys and values of
the decoder's own attention. Both attentions read the same two arrays, each its own slots. A block
is committed as that of any other model.

Positions are relative: the score of a token for another has a learned bias that depends on their
distance alone, shared by all layers. Distances come from the depths of a block's tokens, so trees
have the biases of their paths.

Source: T5 (1910.10683), and the modules of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.cache import KVBlock, KVCache
from specjax.errors import UserError
from specjax.models.attention import Past, Scores, Stored, attend
from specjax.models.layers import Linear, Norm, init, linear_options
from specjax.models.t5_config import T5Config
from specjax.models.transformer import Mlp, Transformer
from specjax.sampling import dtype_of


def buckets(config: T5Config, both_ways: bool) -> np.ndarray:
    """i32[2D+1]: the bucket of each distance -D..D to another token, D = ``max_distance``.

    A distance is the own position less that of the other token. Beyond D the bucket is that of D.
    ``both_ways``: half of the buckets are for later tokens, which a decoder never sees.
    """
    most, count = config.max_distance, config.buckets
    distance = np.arange(-most, most + 1)
    first = np.zeros_like(distance)
    if both_ways:
        count //= 2
        first, distance = np.where(distance < 0, count, 0), np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = count // 2
    # In float32, as in transformers: a value at the edge of a bucket is in the same one.
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    share = np.log(ratio) / np.float32(math.log(most / exact)) * np.float32(count - exact)
    wide = np.minimum(exact + np.trunc(share).astype(int), count - 1)
    return (first + np.where(distance < exact, distance, wide)).astype(np.int32)


class RelativeBias(nnx.Module):
    """The biases of the scores of one stack of layers."""

    def __init__(self, config: T5Config, dtype, rngs: nnx.Rngs, both_ways: bool):
        self.most, self.config, self.both_ways = config.max_distance, config, both_ways
        kw = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs, "embedding_init": init()}
        self.table = nnx.Embed(config.buckets, config.num_heads, **kw)

    def __call__(self, distance: jax.Array) -> jax.Array:
        """i32[B,T,S] -> f32[B,H,T,S], float32 at least."""
        each = self.table.embedding[...][buckets(self.config, self.both_ways)]
        each = each.astype(dtype_of(each))
        place = jnp.clip(distance, -self.most, self.most) + self.most
        return jnp.moveaxis(jnp.take(each, place, axis=0), -1, 1)


class T5Attention(nnx.Module):
    """The projections of an attention, and its three uses. Scores are not divided."""

    def __init__(self, config: T5Config, dtype, rngs: nnx.Rngs):
        self.heads, self.width = config.num_heads, config.head_dim
        kw, inner = linear_options(False, dtype, rngs), config.num_heads * config.head_dim
        self.q, self.k, self.v = (Linear(config.hidden_size, inner, **kw) for _ in range(3))
        self.o = Linear(inner, config.hidden_size, **kw)

    def keys(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B,T,E] -> keys and values [B,T,H,D]."""
        return self._by_head(self.k(x)), self._by_head(self.v(x))

    def both_ways(
        self, x: jax.Array, real: jax.Array, bias: jax.Array, first: int = 0
    ) -> jax.Array:
        """The encoder's: x [B,L,E] -> [B,L,E]; tokens attend to those that are ``real`` bool[B,L].

        ``bias`` f32[1 or B,H,L,L]. The output is that of the tokens from the place ``first`` on.
        """
        q, (k, v) = self._by_head(self.q(x[:, first:])), self.keys(x)
        bias = bias[:, :, first:]
        scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=dtype_of(q)) + bias
        return self._joined(_weighed(scores, real[:, None, None], v.swapaxes(1, 2)).astype(x.dtype))

    def after(
        self, x: jax.Array, view: Past, before: Stored, biases: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The decoder's: x [B,T,E] -> ([B,T,E], keys and values of the T tokens)."""
        q, (k, v) = self._by_head(self.q(x)).swapaxes(1, 2), self.keys(x)
        keys, values = before.block_with(k, v)
        return self._joined(attend(q, Scores(1.0), view, before, keys, values, biases)), k, v

    def across(self, x: jax.Array, before: Stored, source: jax.Array) -> jax.Array:
        """The cross-attention: x [B,T,E] -> [B,T,E], to the first ``source`` i32[B] slots.

        A row without a source gets zeros.
        """
        q = self._by_head(self.q(x)).swapaxes(1, 2)
        keys, values = (array.astype(q.dtype) for array in (before.k_cache, before.v_cache))
        scores = jnp.einsum("bhtd,bhsd->bhts", q, keys, preferred_element_type=dtype_of(q))
        real = (jnp.arange(keys.shape[2]) < source[:, None])[:, None, None]
        out = jnp.where((source > 0)[:, None, None, None], _weighed(scores, real, values), 0)
        return self._joined(out.astype(x.dtype))

    def _by_head(self, x: jax.Array) -> jax.Array:
        """[B,T,H*D] -> [B,T,H,D]."""
        return x.reshape(*x.shape[:2], self.heads, self.width)

    def _joined(self, out: jax.Array) -> jax.Array:
        """[B,H,T,D] -> [B,T,E]."""
        out = out.swapaxes(1, 2)
        return self.o(out.reshape(*out.shape[:2], -1))


def _weighed(scores: jax.Array, real: jax.Array, values: jax.Array) -> jax.Array:
    """The values [B,H,S,D] by the softmax of scores [B,H,T,S] where ``real``: [B,H,T,D]."""
    weights = jax.nn.softmax(jnp.where(real, scores, jnp.finfo(scores.dtype).min), axis=-1)
    weights, wide = weights.astype(values.dtype), dtype_of(values)
    return jnp.einsum("bhts,bhsd->bhtd", weights, values, preferred_element_type=wide)


class EncoderLayer(nnx.Module):
    """Attention in both directions and feed-forward part."""

    def __init__(self, config: T5Config, dtype, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = (Norm(config, dtype) for _ in range(2))
        self.attention = T5Attention(config, dtype, rngs)
        self.mlp = Mlp(config, dtype, rngs)

    def __call__(self, x: jax.Array, real: jax.Array, bias: jax.Array) -> jax.Array:
        """x [B,L,E] -> [B,L,E]."""
        x = x + self.attention.both_ways(self.attention_norm(x), real, bias)
        return x + self.mlp(self.mlp_norm(x))


class DecoderLayer(nnx.Module):
    """Attention to what was written, cross-attention to the source, and feed-forward part."""

    def __init__(self, config: T5Config, dtype, rngs: nnx.Rngs):
        norms = (Norm(config, dtype) for _ in range(3))
        self.attention_norm, self.cross_norm, self.mlp_norm = norms
        self.attention, self.cross = (T5Attention(config, dtype, rngs) for _ in range(2))
        self.mlp = Mlp(config, dtype, rngs)

    def __call__(self, x, biases, view: Past, before: Stored):
        """x [B,T,E] -> ([B,T,E], keys and values of the T tokens [B,T,H,D])."""
        attended, k, v = self.attention.after(self.attention_norm(x), view, before, biases)
        x = x + attended
        assert view.source is not None
        x = x + self.cross.across(self.cross_norm(x), before, view.source)
        return x + self.mlp(self.mlp_norm(x)), k, v


class T5(Transformer):
    """The model; ``dtype`` is that of parameters and activations, logits are float32."""

    config: T5Config

    def _add_layers(self, config: T5Config, dtype, rngs: nnx.Rngs) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        count = config.encoder_layers
        self.source_bias = RelativeBias(config, dtype, rngs, both_ways=True)
        self.source_layers = nnx.List([EncoderLayer(config, dtype, rngs) for _ in range(count)])
        self.source_norm = Norm(config, dtype)
        count = config.num_layers
        self.bias = RelativeBias(config, dtype, rngs, both_ways=False)
        self.layers = nnx.List([DecoderLayer(config, dtype, rngs) for _ in range(count)])

    def read(
        self, tokens: jax.Array, count: jax.Array, remat: bool = False
    ) -> tuple[jax.Array, KVBlock]:
        """The first ``count`` i32[B] of tokens i32[B,L]: the encoder's output [B,L,E], and the keys
        and values of the cross-attentions."""
        place = jnp.arange(tokens.shape[1])
        x, real = self.embedded(tokens), place < count[:, None]
        bias = self.source_bias((place[:, None] - place)[None])
        for layer in self.source_layers:
            x = (jax.checkpoint(layer.__call__) if remat else layer)(x, real, bias)
        memory = self.source_norm(x)
        k, v = zip(*(layer.cross.keys(memory) for layer in self.layers), strict=True)
        return memory, KVBlock(k, v, memory[..., 0].astype(jnp.float32))

    def _inputs(
        self, tokens: jax.Array, view: Past, cache: KVCache, rows, start
    ) -> tuple[jax.Array, Sequence[Any]]:
        """The embeddings, and for each layer the biases of its scores.

        Raises UserError for a cache without slots, which has no source.
        """
        assert rows is None and start is None
        slots = cache.k[0].shape[2]
        if not slots:
            raise UserError(
                "an encoder-decoder model reads its source before it writes, and a text without a "
                "source is to be scored; give the text to models.lm.forward, or take a decoder"
            )
        own, depth = view.positions, view.length[:, None] + view.layout.depth
        inside = self.bias(own[:, :, None] - depth[:, None])
        biases = (inside, self.bias(own[:, :, None] - jnp.arange(slots)))
        return self.embedded(tokens), [biases] * self.config.num_layers

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[B,T,E] -> f32[B,T,V]."""
        if self.config.scale_logits:
            hidden = hidden * jnp.asarray(self.config.hidden_size**-0.5, hidden.dtype)
        return super().logits(hidden)
