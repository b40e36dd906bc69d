"""The norms of a decoder.

Sources: RMSNorm (1910.07467), LayerNorm (1607.06450), Gemma (2403.08295).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.transformer_config import TransformerConfig


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm with a bias, of the last axis; computed in float32.

    ``size`` is the length of that axis; None: the hidden size. (n, length): n norms, of the n
    vectors in the last two axes.
    """

    def __init__(self, config: TransformerConfig, dtype, size: int | tuple[int, int] | None = None):
        self.eps = config.norm_eps
        self.centred = config.norm == "layer"
        # Gemma's RMSNorm: the factor is 1 + the parameter, and is not rounded.
        self.around_one = config.norm == "rms1p"
        size = config.hidden_size if size is None else size
        self.scale = nnx.Param((jnp.zeros if self.around_one else jnp.ones)(size, dtype))
        if self.centred:
            self.bias = nnx.Param(jnp.zeros(size, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.centred:
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        if self.around_one:
            return (y * (1 + self.scale[...].astype(y.dtype))).astype(x.dtype)
        if self.centred:
            # Rounded once, as PyTorch's LayerNorm is; RMSNorm is rounded before its factor too.
            scale, bias = (own[...].astype(y.dtype) for own in (self.scale, self.bias))
            return (y * scale + bias).astype(x.dtype)
        return y.astype(x.dtype) * self.scale[...]
