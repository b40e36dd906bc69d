"""Dynamic trees on the device: the best nodes of a pool, chosen for each context.

EAGLE-2, Li et al. 2024 (2406.16858), section 4. A node is worth the product of the draft's probabilities along its path, so the
expanded tree and the chosen nodes are functions of the context alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.checks import whole
from specjax.errors import UserError


def expand(
    scores: jax.Array, log_probs: jax.Array, top_k: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The ``top_k`` likeliest children of each of K frontier nodes: (tokens i32, total f32, parent i32), all [B,K*top_k].

    ``scores`` f32[B,K] are the frontier's cumulative log-probabilities, ``log_probs`` f32[B,K,V] the draft's after each;
    ``total`` is their sum and ``parent`` a place in the frontier. ``log_probs <= 0`` (a log-softmax is), so that no child
    is worth more than its parent. EAGLE-2 (2406.16858) section 4.1.
    """
    batch, frontier_size, vocab_size = log_probs.shape
    if whole("top_k", top_k, 1) > vocab_size:
        raise UserError(
            f"top_k is {top_k} and the vocabulary has {vocab_size} tokens; at most as many"
        )
    values, tokens = sampling.top(log_probs, top_k)
    total = scores[..., None] + values
    parent = jnp.broadcast_to(jnp.arange(frontier_size, dtype=jnp.int32)[:, None], total.shape)
    flat = (batch, frontier_size * top_k)
    return tokens.astype(jnp.int32).reshape(flat), total.reshape(flat), parent.reshape(flat)


def _ordered(total: jax.Array) -> jax.Array:
    """The same scores as ``top_k`` should see them: it puts NaN first and 0.0 before -0.0, a child before its parent."""
    return jnp.where(jnp.isnan(total), -jnp.inf, jnp.where(total == 0, 0, total))


def frontier(total: jax.Array, k: int) -> jax.Array:
    """i32[B,k]: the best k of ``total`` f32[B,C], best first, ties to the lower index; NaN counts as -inf."""
    if whole("k", k, 1) > total.shape[-1]:
        raise UserError(f"k is {k} and there are {total.shape[-1]} candidates; at most as many")
    return jax.lax.top_k(_ordered(total), k)[1].astype(jnp.int32)


def rerank(total: jax.Array, parents: jax.Array, nodes: int) -> tuple[jax.Array, jax.Array]:
    """The best ``nodes`` of a pool of P: (chosen i32[B,nodes] ascending, their parents i32[B,nodes] as places in chosen).

    ``total`` f32[B,P] are cumulative scores and ``parents`` i32[B,P] places in the pool, -1 for a child of the pending
    token. Needs ``parents[i] < i`` and ``total[i] <= total[parents[i]]``, as ``expand`` gives them: ties go to the lower
    index, so a parent is chosen before its child, and the chosen nodes are a tree in topological order. NaN counts as -inf,
    which is sound while everything below a NaN is NaN or -inf. EAGLE-2 (2406.16858) section 4.2.
    """
    if whole("nodes", nodes, 1) > total.shape[-1]:
        raise UserError(f"nodes is {nodes} and the pool has {total.shape[-1]}; at most as many")
    chosen = jnp.sort(frontier(total, nodes), axis=-1)
    parent = jnp.take_along_axis(parents, chosen, axis=-1)
    place = (chosen[..., None, :] < parent[..., None]).sum(
        -1
    )  # a parent is chosen, at the place after those before it
    return chosen, jnp.where(parent < 0, -1, place).astype(jnp.int32)
