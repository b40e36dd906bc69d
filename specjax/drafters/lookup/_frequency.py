"""From continuations that were seen to a token tree: count their prefixes, and keep the heaviest.

One row; callers vmap. K continuations of at most D tokens cost O(K^2 D) comparisons, which needs no hash table, no order among
them and no growing structure.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Prefixes(NamedTuple):
    """The prefixes of K continuations of at most D tokens: prefix (k, d) is the first d + 1 tokens of continuation k."""

    tokens: jax.Array  # i32[K,D] its last token
    common: jax.Array  # i32[K,K] how many tokens continuations i and j begin with alike
    first: jax.Array  # i32[K,D] the first continuation with this prefix
    kept: jax.Array  # bool[K,D] whether that is k itself: one entry for every distinct prefix


def prefixes(windows: jax.Array) -> Prefixes:
    """The prefixes of windows i32[K,D], each ended by its first negative entry."""
    size, depth = windows.shape
    place, index = jnp.arange(depth), jnp.arange(size)
    # Reductions, not cumulative products: XLA:CPU makes one vectorised loop of each.
    differ = (windows[:, None] != windows[None]) | (windows[None] < 0)
    common = jnp.where(differ, place, depth).min(-1)
    same = common[..., None] > place  # [i,j,d]: j has d + 1 tokens, and they are those of i
    first = jnp.minimum(jnp.where(same, index[:, None], size).min(1), size - 1)
    alive = jnp.diagonal(common)[:, None] > place
    return Prefixes(windows, common, first, alive & (first == index[:, None]))


def weigh(given: Prefixes, weights: jax.Array) -> jax.Array:
    """f32[K,D]: the weight of all continuations with that prefix; never more than that of a shorter prefix."""
    same = given.common[..., None] > jnp.arange(given.tokens.shape[1])
    total = jnp.where(same, weights[:, None], 0).sum(1)
    return jax.lax.cummin(
        total, axis=1
    )  # sums may round, and a parent must not be lighter than its child


def heaviest(
    tokens: jax.Array, first: jax.Array, weight: jax.Array, nodes: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The ``nodes`` heaviest prefixes as a tree: tokens, parents i32[N], valid bool[N], weight f32[N].

    ``tokens`` and ``first`` as in ``Prefixes``; ``weight`` f32[K,D] is 0 but where a prefix is kept. Sorted by weight;
    shorter prefixes first among equals, then those of earlier continuations: every prefix of a chosen prefix is chosen, and
    a parent stands before its children. Prefixes of weight 0 are none.
    """
    size, depth = weight.shape
    score = jnp.where(weight > 0, weight, -1).T.reshape(-1)  # by depth, then by continuation
    count = min(nodes, size * depth)
    best, place = jax.lax.top_k(score, count)  # the lower index first among equals
    level, which = place // size, place % size
    slot = (
        jnp.full((size * depth,), -1, jnp.int32).at[place].set(jnp.arange(count, dtype=jnp.int32))
    )
    above = jnp.maximum(level - 1, 0)
    parents = jnp.where(level > 0, slot[above * size + first[which, above]], -1)
    valid = (best > 0) & ((level == 0) | (parents >= 0))
    fill = (0, nodes - count)
    return (
        jnp.pad(tokens[which, level], fill),
        jnp.pad(jnp.where(valid, parents, -1), fill, constant_values=-1),
        jnp.pad(valid, fill),
        jnp.pad(jnp.where(valid, best, 0), fill),
    )


def tree(
    windows: jax.Array, weights: jax.Array, nodes: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``heaviest`` of the continuations ``windows`` i32[K,D] with ``weights`` f32[K]; see there."""
    given = prefixes(windows)
    return heaviest(
        given.tokens, given.first, jnp.where(given.kept, weigh(given, weights), 0), nodes
    )
