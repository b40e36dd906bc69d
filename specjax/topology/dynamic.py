"""Dynamic trees on the device: the best nodes of a pool, chosen for each context.

The score of a node is the product of the draft's probabilities along its path, so the expanded tree
and the chosen nodes are functions of the context alone.

- EAGLE-2 (Li et al. 2024, 2406.16858, section 4): the best nodes of a level get the same number of
  children each, the best nodes of all levels are the tree.
- Best-first (DDTree, 2604.12989), where the probabilities at a depth are the same below every node
  of the level above: the tree has the nodes with the highest scores of all possible ones, so its
  sum of scores, the expected length of the accepted path under the draft's probabilities, is the
  largest possible. A level gets every child that can be among them (``most`` in ``expand``), and
  the reranking of EAGLE-2 does the rest: no heap is needed.
- Best parents (JetSpec, 2606.18394), for the same kind of probabilities: the best node that has no
  children yet gets all of them, until the tree is full. A child is chosen by the score of its
  parent, so poor children of good parents are in the tree, and the expected length is at most that
  of best-first.
- Beam search (ReDrafter, Cheng et al. 2024, 2403.09919, section 3.2): the best paths of a level are
  continued, and the tree has the paths to the best nodes of the last level, common prefixes once.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling, tree
from specjax.checks import whole
from specjax.errors import UserError
from specjax.types import Array

REFERENCE = ("li2024eagle2", "cheng2024recurrent", "ringel2026accelerating", "hu2026jetspec")

# Of ``by_chance``: the smallest log-probability of a node, and how fine they are.
LEAST, STEPS = -20.0, 1 << 16


def best_first_levels(nodes: int, depth: int, top_k: int) -> tuple[tuple[int, int], ...]:
    """For each level of a best-first tree: how many nodes get children, and how many each.

    The tree has the ``nodes`` best of all paths of up to ``depth`` tokens; see ``expand``.
    """
    levels, width = [], 1
    for level in range(depth):
        width = min(nodes, len(candidates(width, top_k, nodes)))
        levels.append((width if level + 1 < depth else 0, top_k))
    return tuple(levels)


def best_parents_levels(nodes: int, depth: int, top_k: int) -> tuple[tuple[int, int], ...]:
    """For each level of a tree of the best parents: how many nodes get children, how many each.

    ``nodes`` / ``top_k`` parents are needed, rounded up. The pending token is one of them, and a
    parent at level l has l - 1 others above it.
    """
    parents, levels, width = -(-nodes // top_k), [], 1
    for level in range(1, depth + 1):
        width = min(parents - level, width * top_k) if level < depth else 0
        levels.append((width, top_k))
        if not width:
            break
    return tuple(levels)


def candidates(frontier: int, top_k: int, most: int | None = None) -> np.ndarray:
    """i64[C,2]: the (frontier index, child rank) of the children that ``expand`` returns."""
    pairs = itertools.product(range(frontier), range(top_k))
    return np.array([(i, j) for i, j in pairs if most is None or (i + 1) * (j + 1) <= most])


def expand(
    scores: Array, log_probs: Array, top_k: int, most: int | None = None
) -> tuple[Array, Array, Array]:
    """The ``top_k`` most probable children of each of K frontier nodes.

    ``scores`` f32[B,K] are the frontier's cumulative log-probabilities, ``log_probs`` f32[B,K,V]
    the draft's after each, or f32[B,1,V] if they are the same after all. They must be <= 0 (as a
    log-softmax is), so that no child has a higher score than its parent. EAGLE-2 (2406.16858)
    section 4.1.

    With ``most``, a child is left out if it is not among the ``most`` best of the level: child j of
    node i has a score at most that of each child j' <= j of the nodes i' <= i, if the frontier is
    ordered by score and all nodes have the same log-probabilities. Of K * top_k children about
    ``most`` * log(``most``) remain.

    Returns:
        (tokens i32, total f32, parent i32), all [B,C] with C = K * top_k without ``most``:
        ``total`` is the cumulative log-probability, ``parent`` the index in the frontier.

    Raises:
        UserError: ``top_k`` above the size of the vocabulary.
    """
    batch, frontier_size = scores.shape
    vocab_size = log_probs.shape[-1]
    _check_size("top_k", top_k, vocab_size, f"the vocabulary has {vocab_size} tokens")
    values, tokens = sampling.top(log_probs, top_k)
    node, rank = candidates(frontier_size, top_k, most).T
    own = node % log_probs.shape[1]
    total = scores[:, node] + values[:, own, rank]
    parent = jnp.broadcast_to(jnp.asarray(node, jnp.int32), (batch, len(node)))
    return tokens[:, own, rank].astype(jnp.int32), total, parent


def _check_size(name: str, value: int, most: int, there: str) -> None:
    if whole(name, value, 1) > most:
        raise UserError(f"{name} is {value} and {there}; give at most {most}")


def frontier(total: Array, k: int) -> Array:
    """i32[B,k]: indices of the best k of ``total`` f32[B,C], best first, ties to the lower index.

    NaN counts as -inf. Raises UserError for k above C.
    """
    size = total.shape[-1]
    _check_size("k", k, size, f"there are {size} candidates")
    # ``top_k`` puts NaN first, and 0.0 before -0.0: a child before its parent.
    total = jnp.where(jnp.isnan(total), -jnp.inf, jnp.where(total == 0, 0, total))
    return jax.lax.top_k(total, k)[1].astype(jnp.int32)


def rerank(total: Array, parents: Array, nodes: int) -> tuple[Array, Array]:
    """The best ``nodes`` of a pool of P, as a tree in topological order.

    ``total`` f32[B,P] are cumulative scores (for the best parents those of the parents) and
    ``parents`` i32[B,P] indices in the pool, -1 for a child of the pending token. Requires
    ``parents[i] < i`` and ``total[i] <= total[parents[i]]``, as ``expand`` gives them: ties go to
    the lower index, so a parent is chosen before its child.
    NaN counts as -inf, which is correct if everything below a NaN is NaN or -inf. EAGLE-2
    (2406.16858) section 4.2.

    Returns:
        chosen: i32[B,nodes] indices in the pool, ascending.
        parents: i32[B,nodes] their parents, as indices in ``chosen``, or -1.

    Raises:
        UserError: ``nodes`` above P.
    """
    size = total.shape[-1]
    _check_size("nodes", nodes, size, f"the pool has {size}")
    chosen = jnp.sort(frontier(total, nodes), axis=-1)
    parent = jnp.take_along_axis(parents, chosen, axis=-1)
    # The parent is chosen too: its index is the number of chosen nodes before it.
    place = (chosen[..., None, :] < parent[..., None]).sum(-1)
    return chosen, jnp.where(parent < 0, -1, place).astype(jnp.int32)


def by_chance(log_chance: Array, parents: Array | None, valid: Array) -> tuple[Array, Array]:
    """The nodes of a tree, ordered by the chance that their whole path is accepted.

    ``log_chance`` f[B,N] <= 0 is that of each node, given its parent. Ties go to the lower index,
    so a parent comes before its children: the first n nodes are a tree, for every n, and no other
    tree of n nodes has a larger sum of chances. Nodes that do not exist come last.

    Returns:
        order: i32[B,N] the node at each place.
        chance: f32[B,N] of the whole path, in this order; 0 for nodes that do not exist.
    """
    batch, size = valid.shape
    inside = tree.chain_layout(batch, size).visible if parents is None else tree.ancestors(parents)
    # Whole numbers: rounded sums could put a child before its parent.
    parts = jnp.round(jnp.clip(log_chance, LEAST, 0) * STEPS).astype(jnp.int32)
    total = jnp.where(inside, parts[:, None], 0).sum(-1)
    exist = tree.exists(valid, parents)
    order = jnp.argsort(jnp.where(exist, -total, jnp.iinfo(jnp.int32).max), axis=1, stable=True)
    chance = jnp.where(exist, jnp.exp(total / STEPS), 0).astype(jnp.float32)
    return order.astype(jnp.int32), jnp.take_along_axis(chance, order, 1)


def paths(parents: Array, valid: Array, beams: int, nodes: int) -> tuple[Array, Array, Array]:
    """The paths that a beam search ends with, as a tree in topological order.

    The pool has the ``beams`` best candidates of each level, best first, at indices from
    ``level * beams`` on. ``parents`` i32[B,P] are indices in the pool, -1 for a child of the
    pending token; ``valid`` bool[B,P] is False in the levels that a row does not have. The tree has
    the paths to the nodes of the row's last level. A prefix of several paths is one node of the
    pool, so the tree has it once. While there are more than ``nodes``, the path with the lowest
    score is left out.

    Returns:
        chosen: i32[B,nodes] indices in the pool; ascending, and then nodes outside of the tree.
        parents: i32[B,nodes] their parents, as indices in ``chosen``, or -1.
        kept: bool[B,P] the nodes of the tree.

    Raises:
        UserError: a pool of fewer than ``nodes``, ``nodes`` below the number of levels.
    """
    batch, size = parents.shape
    depth = size // whole("beams", beams, 1)
    if not depth <= whole("nodes", nodes, 1) <= size:
        raise UserError(f"nodes is {nodes}; give at least {depth} and at most {size}")
    index = jnp.broadcast_to(jnp.arange(beams), (batch, beams))
    rows, none = jnp.arange(batch)[:, None], jnp.full((batch, beams), beams)
    # The first of the paths through each node; ``beams``: no path.
    first, below, exist = none, none, jnp.zeros((batch, 1), bool)
    firsts = []
    for level in reversed(range(depth)):
        own = slice(level * beams, (level + 1) * beams)
        first = jnp.where(valid[:, own] & ~exist, index, none)
        if firsts:
            under = parents[:, own.stop : own.stop + beams] - own.start
            first = first.at[rows, under].min(below)
        exist, below = valid[:, own], first
        firsts.insert(0, first)
    first = jnp.concatenate(firsts, 1)
    count = (first[:, None] <= jnp.arange(beams)[:, None]).sum(-1)  # [B,beams] of the first paths
    kept = first < (count <= nodes).sum(-1, keepdims=True)
    chosen = jnp.argsort(~kept, axis=-1, stable=True)[:, :nodes].astype(jnp.int32)
    place = jnp.cumsum(kept, -1) - 1
    above = jnp.take_along_axis(jnp.where(kept, parents, -1), chosen, 1)
    return chosen, tree.of_parents(place, above).astype(jnp.int32), kept
