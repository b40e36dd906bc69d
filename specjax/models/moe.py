"""A feed-forward layer of experts, of which a router chooses a few for each token.

Every token is computed by all experts that were chosen for it: no expert has a capacity, so a
token's result does not depend on the other tokens of the batch.

Sources: sparsely gated experts (1701.06538), Qwen3 (2505.09388).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.linear import Linear, init, linear_options


class ExpertMlp(nnx.Module):
    """A router and SwiGLU experts with kernels [experts, in, out].

    ``chosen`` experts compute each token; their weights are softmax probabilities over all
    experts, divided by their sum if ``renormalise``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        chosen: int,
        renormalise: bool,
        dtype,
        rngs: nnx.Rngs,
    ):
        self.experts, self.chosen, self.renormalise = experts, chosen, renormalise
        self.router = Linear(hidden_size, experts, **linear_options(False, dtype, rngs))
        shape = (experts, hidden_size, intermediate_size)
        self.gate = nnx.Param(init()(rngs.params(), shape, dtype))
        self.up = nnx.Param(init()(rngs.params(), shape, dtype))
        self.down = nnx.Param(init()(rngs.params(), (shape[0], shape[2], shape[1]), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B,T,E] -> [B,T,E]."""
        weights, index = self.route(x)
        flat = x.reshape(-1, x.shape[-1])
        weights, index = (each.reshape(-1, self.chosen) for each in (weights, index))
        few = index.size <= self.experts
        compute = self._each_choice if few else self._each_expert
        return compute(flat, weights, index).reshape(x.shape)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B,T,E] -> the weights [B,T,k] in the dtype of x, and the experts i32[B,T,k]."""
        logits = self.router(x)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        weights, index = jax.lax.top_k(jax.nn.softmax(logits.astype(wide)), self.chosen)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights.astype(x.dtype), index

    def _each_choice(self, x: jax.Array, weights: jax.Array, index: jax.Array) -> jax.Array:
        """Reads the kernels of the chosen experts only, once for each token and choice.

        One choice after another: a gather of [N*k,E,F] would copy the kernels.
        """
        kernels = self.gate[...], self.up[...], self.down[...]

        def add(out, choice):
            row, weight, expert = choice
            token = jax.lax.dynamic_slice_in_dim(x, row, 1)
            own = (jax.lax.dynamic_index_in_dim(kernel, expert, 0, False) for kernel in kernels)
            return out.at[row].add((_swiglu(token, *own) * weight)[0]), None

        rows = jnp.repeat(jnp.arange(x.shape[0]), self.chosen)
        choices = rows, weights.reshape(-1), index.reshape(-1)
        return jax.lax.scan(add, jnp.zeros_like(x), choices)[0]

    def _each_expert(self, x: jax.Array, weights: jax.Array, index: jax.Array) -> jax.Array:
        """Reads all kernels once; each expert computes all tokens, and the chosen ones count."""
        mine = index[..., None] == jnp.arange(self.experts)  # bool[N,k,experts]
        weights = jnp.where(mine, weights[..., None], 0).sum(1).T
        kernels = self.gate[...], self.up[...], self.down[...]

        def add(out, expert):
            *own, weight, counts = expert
            # Selected, not multiplied by 0: an expert that was not chosen may give NaN.
            part = jnp.where(counts[:, None], _swiglu(x, *own) * weight[:, None], 0)
            return out + part, None

        return jax.lax.scan(add, jnp.zeros_like(x), (*kernels, weights, mine.any(1).T))[0]


def _swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """[N,E] -> [N,E] with kernels [E,F], [E,F], [F,E]."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down
