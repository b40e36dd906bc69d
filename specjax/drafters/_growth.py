"""Grows a draft along a tree of a fixed shape, level by level, and chooses the children.

Drafters differ in where the logits after a node come from: ``draft_tree`` runs a small model, heads
read the target's features. They give this as a function ``Expand``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.rng import DRAFT, RowKeys
from specjax.topology.shapes import Topology
from specjax.types import CHAIN, DETERMINISTIC, IID, WITHOUT_REPLACEMENT, Context, Draft

# The values of the key "siblings" -> the kind of draft that they make.
KINDS = {"without_replacement": WITHOUT_REPLACEMENT, "iid": IID, "top_k": DETERMINISTIC}

# (state, level, its nodes that have children, their tokens i32[B,n]) -> (logits f[B,m,V], for each
# of the n nodes the index of its logits among the m, state). Level 0 is the pending token, node -1.
Expand = Callable[[Any, int, list[int], jax.Array], tuple[jax.Array, np.ndarray, Any]]


def grow(
    keys: RowKeys,
    context: Context,
    shape: Topology,
    siblings: str,
    kind: str,
    state: Any,
    expand: Expand,
) -> tuple[Draft, Any]:
    """A draft of this shape and the last state of ``expand``.

    With ``kind`` CHAIN the draft has no parents.
    """
    batch = context.length.shape[0]
    expanding, tokens = [-1], context.pending[:, None]
    levels, order, finite = [], [], jnp.ones((batch,), bool)
    for depth, level in enumerate(shape.levels):
        logits, which, state = expand(state, depth, expanding, tokens)
        finite &= jnp.isfinite(logits.max(-1)).all(-1)
        levels.append(children(keys, context, logits, which, expanding, shape, siblings))
        order += level
        drafted = jnp.concatenate([each.tokens for each in levels], 1)
        expanding = [node for node in level if shape.children[node + 1]]
        tokens = drafted[:, np.array([order.index(node) for node in expanding], int)]
    back = np.argsort(np.array(order))
    draft = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1)[:, back], *levels)
    parents = jnp.broadcast_to(jnp.asarray(shape.parents, jnp.int32), (batch, shape.nodes))
    return draft.replace(
        parents=None if kind == CHAIN else parents, finite=finite, depth=shape.depth
    ), state


def children(
    keys: RowKeys,
    context: Context,
    logits: jax.Array,
    which: np.ndarray,
    expanding: list[int],
    shape: Topology,
    siblings: str,
) -> Draft:
    """The children of the nodes ``expanding``, ordered by node number.

    ``logits`` f[B,m,V]; ``which`` is the index among the m for each expanding node.
    """
    index = {node: i for i, node in enumerate(expanding)}
    level = sorted(child for node in expanding for child in shape.children[node + 1])
    parent = np.array([index[shape.parents[node]] for node in level])
    rank = np.array([shape.ranks[node] for node in level])
    most = int(rank.max()) + 1
    best = sampling.top(logits, most)[1][:, which[parent], rank]
    always = jnp.ones_like(best, bool)
    if siblings == "top_k":
        return Draft(best, always)

    def sampled():
        probs = sampling.to_probs(logits, context.sampling)[:, which]
        greedy = context.sampling.greedy[:, None]
        if siblings == "iid":
            tokens, real = keys.draw(DRAFT, probs[:, parent], jnp.asarray(level)), always
            probs = probs[:, parent]
        else:
            drawn, exist = keys.draw_distinct(DRAFT, probs, most, jnp.asarray(expanding) + 1)
            tokens, real = drawn[:, parent, rank], exist[:, parent, rank]
            probs = _without_replacement(probs, drawn)[:, parent, rank]
        return jnp.where(greedy, best, tokens), greedy | real, probs

    def greedy():
        return best, always, jnp.zeros((*best.shape, logits.shape[-1]), sampling.dtype_of(logits))

    tokens, valid, probs = jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled)
    return Draft(tokens, valid, probs=probs)


def _without_replacement(probs: jax.Array, drawn: jax.Array) -> jax.Array:
    """f[B,n,k,V]: the probabilities of each draw, given the draws before it.

    ``probs`` f[B,n,V] are those of the first draw, ``drawn`` i32[B,n,k] the tokens in order.
    """
    each = [probs]
    for rank in range(drawn.shape[-1] - 1):
        left = jnp.where(jnp.arange(probs.shape[-1]) == drawn[..., rank, None], 0, each[-1])
        total = left.sum(-1, keepdims=True)
        each.append(left / jnp.where(total > 0, total, 1))
    return jnp.stack(each, 2)
