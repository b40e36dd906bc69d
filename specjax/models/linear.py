"""The linear map of every layer of a decoder."""

from __future__ import annotations

import jax
from flax import nnx

from specjax.models import short_blocks


class Linear(nnx.Linear):
    """A linear map of the last axis; long blocks are flattened to [B*T,E].

    For the gradient of a product with [B,T,E], XLA:CPU copies the weights into another layout. The
    short blocks of decoding are faster without the reshape there (``specjax.models.short_blocks``).
    """

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        if inputs.shape[-2] <= short_blocks.TOKENS:
            return short_blocks.product(
                lambda x: super(Linear, self).__call__(x, out_sharding), inputs
            )
        flat = super().__call__(inputs.reshape(-1, inputs.shape[-1]), out_sharding)
        return flat.reshape(*inputs.shape[:-1], -1)


def tied_head(embed: nnx.Embed, hidden: jax.Array) -> jax.Array:
    """``hidden`` [...,T,E] times the embeddings [V,E]: [...,T,V].

    The product contracts the last axes of both. ``nnx.Embed.attend`` transposes the embeddings;
    XLA:CPU of jax 0.12 fuses the transpose, the product and the norm before them into one slow
    loop over the vocabulary.
    """

    def compute(x: jax.Array) -> jax.Array:
        x, table = embed.promote_dtype((x, embed.embedding[...]), dtype=embed.dtype)
        return jax.lax.dot_general(x, table, (((x.ndim - 1,), (1,)), ((), ())))

    return short_blocks.product(compute, hidden)


def linear_options(bias: bool, dtype, rngs: nnx.Rngs) -> dict:
    return {
        "use_bias": bias,
        "dtype": dtype,
        "param_dtype": dtype,
        "rngs": rngs,
        "kernel_init": init(),
    }


def init():
    return nnx.initializers.normal(0.02)
