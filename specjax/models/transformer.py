"""One decoder for the Llama family and GPT-2: from tokens to the input of the LM head.

A block of tokens is first written into the cache; attention then reads the cache through one mask.
Prefill, single steps, draft chains and draft trees therefore share this code.

Sources: Llama (2302.13971), grouped-query attention (2305.13245), rotary positions (2104.09864),
Llama 3 frequency scaling (2407.21783 and its released configuration), GPT-2 (Radford et al. 2019).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax import tree
from specjax.cache import KVCache


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (the only kind supported)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder.

    ``family`` is "llama" (RMSNorm, rotary positions, SwiGLU) or "gpt2" (LayerNorm, learned
    positions, GELU).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()


def rope_frequencies(config: TransformerConfig) -> jax.Array:
    """f32[D/2]: the angle per position of each pair of dimensions."""
    inverse = config.rope_theta ** (
        -jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    )
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    wavelength = 2 * math.pi / inverse
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    return jnp.where(
        wavelength > low, inverse / scaling.factor, jnp.where(wavelength < high, inverse, between)
    )


def rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotary positions for x [B,T,H,D] at angle f32[B,T,D/2].

    The pairs are (i, i + D/2), as in Hugging Face checkpoints.
    """
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class Linear(nnx.Linear):
    """A linear map of the last axis; long blocks are flattened to [B*T,E].

    For the gradient of a product with [B,T,E], XLA:CPU copies the weights into another layout. The
    short blocks of decoding are faster without the reshape.
    """

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        if inputs.shape[-2] <= 16:
            return super().__call__(inputs, out_sharding)
        flat = super().__call__(inputs.reshape(-1, inputs.shape[-1]), out_sharding)
        return flat.reshape(*inputs.shape[:-1], -1)


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm with a bias; computed in float32."""

    def __init__(self, config: TransformerConfig, dtype):
        self.eps = config.norm_eps
        self.centred = config.family == "gpt2"
        self.scale = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        if self.centred:
            self.bias = nnx.Param(jnp.zeros((config.hidden_size,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.centred:
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        y = y.astype(x.dtype) * self.scale[...]
        return y + self.bias[...] if self.centred else y


class Attention(nnx.Module):
    """Grouped-query attention over a cache."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.width = config.head_dim
        kw = _linear_options(config.attention_bias, dtype, rngs)
        self.q = Linear(config.hidden_size, self.heads * self.width, **kw)
        self.k = Linear(config.hidden_size, self.kv_heads * self.width, **kw)
        self.v = Linear(config.hidden_size, self.kv_heads * self.width, **kw)
        self.o = Linear(self.heads * self.width, config.hidden_size, **kw)

    def __call__(self, x, angle, mask, k_cache, v_cache, start):
        batch, size, _ = x.shape
        q = self.q(x).reshape(batch, size, self.heads, self.width)
        k = self.k(x).reshape(batch, size, self.kv_heads, self.width)
        v = self.v(x).reshape(batch, size, self.kv_heads, self.width)
        if angle is not None:
            q, k = rotate(q, angle), rotate(k, angle)
        keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
        group = self.heads // self.kv_heads
        # [B,T,K*G,D] -> [B,K,G*T,D]: one matrix product per key head for all queries of its group.
        q = q.reshape(batch, size, self.kv_heads, group, self.width).transpose(0, 2, 3, 1, 4)
        q = q.reshape(batch, self.kv_heads, group * size, self.width)
        if size == 1:
            # A single token attends to the old cache and to itself, and is written afterwards. If
            # the write came first, XLA:CPU would copy the whole buffer for each reader: three times
            # the time after 2048 tokens.
            before = jnp.arange(k_cache.shape[2]) < start[:, None, None]
            out = _attend(q, mask & before, k_cache, v_cache, keys, values)
            # Makes the write depend on the result, which orders it after the attention. (The sum
            # differs from ``start`` only in rows with NaN, which have failed already.)
            start = start + jnp.isnan(out[:, 0, 0, 0])
            k_cache, v_cache = kv.write(k_cache, keys, start), kv.write(v_cache, values, start)
        else:
            k_cache, v_cache = kv.write(k_cache, keys, start), kv.write(v_cache, values, start)
            out = _attend(q, mask, k_cache, v_cache)
        out = out.reshape(batch, self.kv_heads, group, size, self.width).transpose(0, 3, 1, 2, 4)
        return self.o(out.reshape(batch, size, -1)), k_cache, v_cache


def _attend(q, mask, k_cache, v_cache, own_key=None, own_value=None):
    """Attention of queries [B,K,G*T,D] over the slots S that ``mask`` bool[B,T,S] allows.

    ``own_key`` and ``own_value`` [B,K,T,D] are one more slot, of the query's own token (T = 1).
    """
    batch, heads, rows, width = q.shape
    size = mask.shape[1]

    def score(keys):
        product = jnp.einsum(
            "bkqd,bksd->bkqs", q, keys.astype(q.dtype), preferred_element_type=jnp.float32
        )
        return product.reshape(batch, heads, rows // size, size, -1) / math.sqrt(width)

    scores = score(k_cache)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)
    slots = scores.shape[-1]
    if own_key is not None:
        scores = jnp.concatenate([scores, score(own_key)], -1)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(batch, heads, rows, -1)
    out = jnp.einsum("bkqs,bksd->bkqd", weights[..., :slots], v_cache.astype(q.dtype))
    return out if own_value is None else out + weights[..., slots:] * own_value.astype(q.dtype)


class Mlp(nnx.Module):
    """SwiGLU, or two layers with the tanh approximation of GELU."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        self.gated = config.family == "llama"
        kw = _linear_options(config.mlp_bias, dtype, rngs)
        if self.gated:
            self.gate = Linear(config.hidden_size, config.intermediate_size, **kw)
        self.up = Linear(config.hidden_size, config.intermediate_size, **kw)
        self.down = Linear(config.intermediate_size, config.hidden_size, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gated:
            return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        self.attention_norm = Norm(config, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.mlp_norm = Norm(config, dtype)
        self.mlp = Mlp(config, dtype, rngs)

    def __call__(self, x, angle, mask, k_cache, v_cache, start):
        attended, k_cache, v_cache = self.attention(
            self.attention_norm(x), angle, mask, k_cache, v_cache, start
        )
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), k_cache, v_cache


class Transformer(nnx.Module):
    """The decoder; ``dtype`` is that of parameters and activations, logits are float32."""

    def __init__(self, config: TransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        kw = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs, "embedding_init": _init()}
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, **kw)
        if config.family == "gpt2":
            self.positions = nnx.Embed(config.max_positions, config.hidden_size, **kw)
        self.layers = nnx.List([Block(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = Norm(config, dtype)
        if not config.tie_embeddings:
            kw = _linear_options(False, dtype, rngs)
            self.head = Linear(config.hidden_size, config.vocab_size, **kw)

    def __call__(
        self, tokens, cache: KVCache, parents=None, taps: tuple[int, ...] = (), remat: bool = False
    ):
        """tokens i32[B,T] -> (hidden [B,T,E], taps, cache with the block written, not committed).

        ``parents`` i32[B,P] may describe a longer block; ``tokens`` are then its last T (see
        ``types.LM``). ``remat`` as in ``lm.from_config``.
        """
        batch, size = tokens.shape
        block = size if parents is None else parents.shape[1]
        written = block - size
        # Ids are out of range only in masked draft nodes and past the length limit; the results of
        # both are discarded later.
        x = self.embed(jnp.clip(tokens, 0, self.config.vocab_size - 1))
        position = cache.length[:, None] + tree.depths(parents, batch, block)[:, written:]
        angle = None
        if self.config.family == "gpt2":
            x = x + self.positions(jnp.clip(position, 0, self.config.max_positions - 1))
        else:
            angle = position[..., None].astype(jnp.float32) * rope_frequencies(self.config)
        mask = tree.visible(cache.length, block, cache.k[0].shape[2], parents)[:, written:]
        keys, values, tapped = [], [], {}
        for index, layer in enumerate(self.layers):
            call = jax.checkpoint(layer.__call__) if remat else layer
            x, k, v = call(x, angle, mask, cache.k[index], cache.v[index], cache.length + written)
            keys.append(k)
            values.append(v)
            tapped[index] = x
        hidden = self.norm(x)
        return hidden, tuple(tapped[i] for i in taps), cache.replace(k=tuple(keys), v=tuple(values))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[B,T,E] -> f32[B,T,V]."""
        out = self.embed.attend(hidden) if self.config.tie_embeddings else self.head(hidden)
        return out.astype(jnp.promote_types(out.dtype, jnp.float32))


def _linear_options(bias: bool, dtype, rngs: nnx.Rngs) -> dict:
    return {
        "use_bias": bias,
        "dtype": dtype,
        "param_dtype": dtype,
        "rngs": rngs,
        "kernel_init": _init(),
    }


def _init():
    return nnx.initializers.normal(0.02)
