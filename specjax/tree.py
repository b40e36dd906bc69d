"""Relations between the nodes of a draft tree, and the attention mask of a block over a cache.

A block is the pending token followed by draft nodes. ``parents=None`` means a chain and needs no
computation; otherwise ``parents`` is i32[B,T] with -1 for a root and ``parents[i] < i``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ancestors(parents: jax.Array) -> jax.Array:
    """bool[B,T,T]: whether node j is i or an ancestor of i (by repeated squaring: log2 T steps)."""
    size = parents.shape[-1]
    step = jax.nn.one_hot(parents, size, dtype=jnp.float32)  # -1 gives a zero row
    reach = jnp.minimum(step + jnp.eye(size, dtype=jnp.float32), 1)
    for _ in range(max(size - 1, 1).bit_length()):
        reach = jnp.minimum(reach @ reach, 1)
    return reach > 0.5


def depths(parents: jax.Array | None, batch: int, size: int) -> jax.Array:
    """i32[B,T] distance from the root of the block."""
    if parents is None:
        return jnp.broadcast_to(jnp.arange(size), (batch, size))
    return ancestors(parents).sum(-1).astype(jnp.int32) - 1


def visible(length: jax.Array, size: int, slots: int, parents: jax.Array | None) -> jax.Array:
    """bool[B,T,S]: slots below ``length``, and inside the block ancestors-or-self."""
    slot = jnp.arange(slots)
    if parents is None:
        return slot <= (length[:, None] + jnp.arange(size))[..., None]
    inside = jnp.zeros((parents.shape[0], size, slots), bool)
    place = jax.vmap(lambda row, block, at: jax.lax.dynamic_update_slice(row, block, (0, at)))
    inside = place(inside, ancestors(parents), length)
    return (slot < length[:, None, None]) | inside


def exists(valid: jax.Array, parents: jax.Array | None) -> jax.Array:
    """bool[B,N]: nodes that are valid and have only valid ancestors."""
    if parents is None:
        return jnp.cumprod(valid.astype(jnp.int32), axis=-1) > 0
    return ~(ancestors(parents) & ~valid[:, None]).any(-1)


def path_to(node: jax.Array, parents: jax.Array, depth: int) -> jax.Array:
    """i32[B,depth], -1 padded: the nodes from a child of the root down to ``node`` i32[B].

    ``node`` -1 is the root itself: its path is empty.
    """
    size = parents.shape[1]
    inside = ancestors(parents)
    level = inside.sum(-1) - 1  # 0 for a child of the root
    on_path = jnp.take_along_axis(inside, jnp.maximum(node, 0)[:, None, None], 1)[:, 0]
    on_path &= (node >= 0)[:, None]
    here = on_path[:, None] & (level[:, None] == jnp.arange(depth)[:, None])  # bool[B,depth,N]
    return jnp.where(here, jnp.arange(size), -1).max(-1).astype(jnp.int32)


def nodes_at(
    prefix: jax.Array, count: jax.Array, tokens: jax.Array, exist: jax.Array, parents: jax.Array
) -> jax.Array:
    """bool[B,N+1]: the nodes whose path has the tokens ``prefix[:, :count]``; column 0 is the root.

    ``prefix`` i32[B,M], ``count`` i32[B]; ``tokens`` i32[B,N], ``exist`` bool[B,N] and ``parents``
    i32[B,N] are the tree. Independent siblings may have the same token, so there may be several.
    """
    rows, nodes = tokens.shape
    here = jnp.broadcast_to(jnp.arange(nodes + 1) == 0, (rows, nodes + 1))
    for depth in range(prefix.shape[1]):
        inside = exist & jnp.take_along_axis(here, parents + 1, 1)
        below = inside & (tokens == prefix[:, depth, None])
        here = jnp.where((depth < count)[:, None], jnp.pad(below, ((0, 0), (1, 0))), here)
    return here
