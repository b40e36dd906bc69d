"""Builds a token tree from continuations: counts their prefixes and keeps the heaviest.

One row; callers vmap. K continuations of at most D tokens cost O(K^2 D) comparisons. No hash table,
no order among the continuations and no growing structure is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.types import Array


class Prefixes(NamedTuple):
    """The prefixes of K continuations of at most D tokens.

    Prefix (k, d) is the first d + 1 tokens of continuation k.
    """

    tokens: Array  # i32[K,D] its last token
    common: Array  # i32[K,K] length of the common prefix of continuations i and j
    first: Array  # i32[K,D] the first continuation with this prefix
    is_first: Array  # bool[K,D] ``first`` is k: True once for every distinct prefix


class Tree(NamedTuple):
    """N nodes, sorted by weight; a parent comes before its children."""

    tokens: Array  # i32[N]
    valid: Array  # bool[N]
    parents: Array  # i32[N]
    weight: Array  # f32[N]


def prefixes(windows: Array) -> Prefixes:
    """The prefixes of windows i32[K,D], each ended by its first negative entry."""
    size, depth = windows.shape
    place, index = jnp.arange(depth), jnp.arange(size)
    # Reductions, not cumulative products: XLA:CPU makes one vectorised loop of each.
    differ = (windows[:, None] != windows[None]) | (windows[None] < 0)
    common = jnp.where(differ, place, depth).min(-1)
    # [i,j,d]: j has d + 1 tokens, and they are those of i
    first = jnp.minimum(jnp.where(common[..., None] > place, index[:, None], size).min(1), size - 1)
    exists = jnp.diagonal(common)[:, None] > place
    return Prefixes(windows, common, first, exists & (first == index[:, None]))


def weigh(counted: Prefixes, weights: Array) -> Array:
    """The total weight of the continuations with each prefix, f32[K,D].

    A prefix is never heavier than a shorter prefix of the same continuation.

    Args:
        counted: of K continuations.
        weights: f32[K], one per continuation.
    """
    same = counted.common[..., None] > jnp.arange(counted.tokens.shape[1])
    # Sums may round, and a parent must not be lighter than its child.
    return jax.lax.cummin(jnp.where(same, weights[:, None], 0).sum(1), axis=1)


def heaviest(tokens: Array, first: Array, weight: Array, nodes: int) -> Tree:
    """The ``nodes`` heaviest prefixes as a tree.

    Sorted by weight. Among equal weights shorter prefixes come first, then those of earlier
    continuations: every prefix of a chosen prefix is chosen, and a parent comes before its
    children. Prefixes of weight 0 are left out.

    Args:
        tokens, first: i32[K,D] as in ``Prefixes``.
        weight: f32[K,D], 0 except where ``is_first``.
        nodes: N, the size of the tree.
    """
    size, depth = weight.shape
    count = min(nodes, size * depth)
    # By depth, then by continuation; ``top_k`` takes the lower index first among equals.
    best, place = jax.lax.top_k(jnp.where(weight > 0, weight, -1).T.reshape(-1), count)
    level, which = place // size, place % size
    numbers = jnp.arange(count, dtype=jnp.int32)
    node = jnp.full((size * depth,), -1, jnp.int32).at[place].set(numbers)
    above = jnp.maximum(level - 1, 0)
    parents = jnp.where(level > 0, node[above * size + first[which, above]], -1)
    valid = (best > 0) & ((level == 0) | (parents >= 0))
    fill = (0, nodes - count)
    return Tree(
        jnp.pad(tokens[which, level], fill),
        jnp.pad(valid, fill),
        jnp.pad(jnp.where(valid, parents, -1), fill, constant_values=-1),
        jnp.pad(jnp.where(valid, best, 0), fill),
    )


def tree(windows: Array, weights: Array, nodes: int) -> Tree:
    """``heaviest`` of the continuations ``windows`` i32[K,D] with ``weights`` f32[K]."""
    counted = prefixes(windows)
    weight = jnp.where(counted.is_first, weigh(counted, weights), 0)
    return heaviest(counted.tokens, counted.first, weight, nodes)
