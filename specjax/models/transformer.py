"""One decoder for the Llama family and GPT-2: from tokens to the input of the LM head.

Attention reads two parts: the committed text in the cache, and the tokens of the block itself
through a mask. Prefill, single steps, draft chains, draft trees and packed documents share this
code. The cache is not written (see ``specjax.cache.commit``).

Sources: Llama (2302.13971), grouped-query attention (2305.13245), rotary positions (2104.09864),
Llama 3 frequency scaling (2407.21783 and its released configuration), GPT-2 (Radford et al. 2019).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.cache import KVBlock, KVCache
from specjax.models import short_blocks
from specjax.models.attention import (
    Attention,
    Linear,
    Past,
    Stored,
    init,
    linear_options,
    past,
    rope_angle,
    stored,
)
from specjax.models.logits import in_float32
from specjax.models.norm import Norm
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Layout


class Mlp(nnx.Module):
    """SwiGLU, or two layers with the tanh approximation of GELU."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        self.gated = config.family == "llama"
        kw = linear_options(config.mlp_bias, dtype, rngs)
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

    def __call__(self, x, angle, past: Past, stored: Stored):
        """x [B,T,E] -> ([B,T,E], keys and values of the T tokens [B,T,H,D])."""
        attended, k, v = self.attention(self.attention_norm(x), angle, past, stored)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), k, v


class Transformer(nnx.Module):
    """The decoder; ``dtype`` is that of parameters and activations, logits are float32."""

    def __init__(self, config: TransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype = config, dtype
        kw = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs, "embedding_init": init()}
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, **kw)
        if config.family == "gpt2":
            self.positions = nnx.Embed(config.max_positions, config.hidden_size, **kw)
        self.layers = nnx.List([Block(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = Norm(config, dtype)
        if not config.tie_embeddings:
            kw = linear_options(False, dtype, rngs)
            self.head = Linear(config.hidden_size, config.vocab_size, **kw)

    def __call__(
        self,
        tokens,
        cache: KVCache,
        layout: Layout | None = None,
        block: KVBlock | None = None,
        taps: tuple[int, ...] = (),
        remat: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], KVBlock]:
        """tokens i32[B,T] -> (hidden [B,T,E], taps, keys and values of these tokens).

        ``layout`` and ``block`` as in ``types.LM``, ``remat`` as in ``lm.from_config``.
        """
        fed = 0 if block is None else block.output.shape[1]
        view = past(cache, tokens.shape[1], layout, fed)
        # Ids are out of range only in masked draft nodes and past the length limit; the results of
        # both are discarded later.
        x = self.embed(jnp.clip(tokens, 0, self.config.vocab_size - 1))
        angle = None
        if self.config.family == "gpt2":
            place = jnp.clip(view.positions, 0, self.config.max_positions - 1)
            x = x + self.positions(place)
        else:
            angle = rope_angle(self.config, view.positions)
        keys, values, tapped = [], [], {}
        for index, layer in enumerate(self.layers):
            call = jax.checkpoint(layer.__call__) if remat else layer
            x, k, v = call(x, angle, view, stored(cache, block, index))
            keys.append(k)
            values.append(v)
            tapped[index] = x
        hidden = self.norm(x)
        own = KVBlock(tuple(keys), tuple(values), hidden[..., 0].astype(jnp.float32))
        return hidden, tuple(tapped[i] for i in taps), own

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[B,T,E] -> f32[B,T,V]."""
        tied = self.config.tie_embeddings
        out = short_blocks.product(self.embed.attend, hidden) if tied else self.head(hidden)
        return in_float32(out)
