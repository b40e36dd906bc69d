"""Mamba-2: a layer with a state in the place of keys and values, which it does not correct.

A token with the state S [K,V] before it takes exp(decay) S, adds its key times its value, and reads
the result at its query. The key is B, the query C, the value x times the step size of its head, and
the decay -exp(a_log) times the step size:

    S' = exp(decay) S + B (step x)^T;   o = S'^T C + d x

So it is the gated delta rule without the correction, and a block is computed in the same way
(``gated_delta.delta_rule``): attention inside the block with the ancestors as its mask.

Sources: Mamba-2 (2405.21060), Nemotron-H (2504.03624, and its module in transformers 5, which takes
no step below ``Recurrent.least_step`` in passes over several tokens; here no token does).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.cache import Updates
from specjax.models import gated_delta
from specjax.models.gated_delta import Before, Convolution, Tokens, convolved, new_rates
from specjax.models.layers import Linear, linear_options
from specjax.models.transformer_config import TransformerConfig

REFERENCE = ("dao2024transformers", "nvidia2025nemotronh")


class Scale(nnx.Module):
    """The factors of a norm."""

    def __init__(self, size: int, dtype):
        self.scale = nnx.Param(jnp.ones((size,), dtype))


class Mamba2(nnx.Module):
    """The layer: convolution, recurrence, a gate, a norm of each group, and a linear map."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        assert config.recurrent is not None
        self.sizes, self.eps = config.recurrent, config.norm_eps
        own, width = self.sizes, config.hidden_size
        kw = linear_options(False, dtype, rngs)
        keys, values = own.key_heads * own.key_dim, own.value_heads * own.value_dim
        self.z, self.x = (Linear(width, values, **kw) for _ in range(2))
        self.b, self.c = (Linear(width, keys, **kw) for _ in range(2))
        self.dt = Linear(width, own.value_heads, **kw)
        self.x_conv, self.b_conv, self.c_conv = (
            Convolution(own.kernel, size, dtype, rngs, bias=True) for size in (values, keys, keys)
        )
        self.a_log, self.dt_bias = new_rates(own.value_heads, dtype, rngs)
        self.d = nnx.Param(jnp.ones((own.value_heads,), dtype))
        self.norm = Scale(values, dtype)
        self.o = Linear(values, width, **kw)

    def __call__(
        self, x: jax.Array, layout: Any, at: jax.Array | None, before: Before
    ) -> tuple[jax.Array, Updates]:
        """x [B,T,E] -> ([B,T,E], the updates of the T tokens); arguments as in ``GatedDelta``."""
        own, wide = self.sizes, jnp.promote_types(x.dtype, jnp.float32)
        inputs = jnp.concatenate([self.x(x), self.b(x), self.c(x)], -1)
        parts = (self.x_conv, self.b_conv, self.c_conv)
        kernel = jnp.concatenate([part.kernel[...] for part in parts], -1)
        bias = jnp.concatenate([part.bias[...] for part in parts if part.bias is not None], -1)
        mixed = convolved(kernel, inputs, before, at) + bias
        mixed = jax.nn.silu(mixed.astype(wide)).astype(x.dtype).astype(wide)
        keys, values = own.key_heads * own.key_dim, own.value_heads * own.value_dim
        value, b, c = jnp.split(mixed, (values, values + keys), -1)
        b, c = (part.reshape(*x.shape[:2], own.key_heads, -1) for part in (b, c))
        value = value.reshape(*x.shape[:2], own.value_heads, -1)
        bias, rate = self.dt_bias[...].astype(wide), jnp.exp(self.a_log[...].astype(wide))
        step = jax.nn.softplus(self.dt(x).astype(wide) + bias)
        step = jnp.maximum(step, own.least_step)
        tokens = Tokens(c, b, value * step[..., None], None, -rate * step)
        state = before.state.memory
        out, written = gated_delta.delta_rule(tokens, layout, state, before.fed)
        out = out + self.d[...].astype(wide)[:, None] * value
        out = self._gated(out.reshape(*x.shape[:2], -1), self.z(x).astype(wide))
        return self.o(out.astype(x.dtype)), Updates(b, written, tokens.decay, inputs)

    def _gated(self, out: jax.Array, gate: jax.Array) -> jax.Array:
        """[B,T,HV] each -> the norm of each group after the gate."""
        out = (out * jax.nn.silu(gate)).reshape(*out.shape[:2], self.sizes.key_heads, -1)
        out = out * jax.lax.rsqrt((out * out).mean(-1, keepdims=True) + self.eps)
        return out.reshape(gate.shape) * self.norm.scale[...].astype(out.dtype)
