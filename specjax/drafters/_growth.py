"""Growing a draft along a tree of a fixed shape, level by level: how children are chosen, whoever gives the logits.

Drafters that run a small model (``draft_tree``) and heads on the target's features (``_heads``) differ only in where the
logits after a node come from.
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

KINDS = {"without_replacement": WITHOUT_REPLACEMENT, "iid": IID, "top_k": DETERMINISTIC}

# (state, level, its nodes that have children, their tokens i32[B,n]) -> (logits f[B,m,V], which of the m belongs to each of
# the n nodes, state). Level 0 is the pending token, node -1.
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
    """A draft of this shape, and the state that ``expand`` left behind; ``kind`` is CHAIN for a draft without parents."""
    batch = context.length.shape[0]
    expanding, tokens = [-1], context.pending[:, None]
    levels, order, finite = [], [], jnp.ones((batch,), bool)
    for depth, level in enumerate(shape.levels):
        logits, which, state = expand(state, depth, expanding, tokens)
        finite &= jnp.isfinite(logits.max(-1)).all(-1)
        levels.append(children(keys, context, logits, which, expanding, shape, siblings))
        order += level
        known = jnp.concatenate([each.tokens for each in levels], 1)
        expanding = [node for node in level if shape.children[node + 1]]
        tokens = known[:, np.array([order.index(node) for node in expanding], int)]
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
    """The children of the nodes ``expanding``, in the order of their level; logits f[B,m,V], ``which`` of m for each node."""
    of = {node: i for i, node in enumerate(expanding)}
    level = sorted(child for node in expanding for child in shape.children[node + 1])
    parent = np.array([of[shape.parents[node]] for node in level])
    rank = np.array([shape.ranks[node] for node in level])
    most = int(rank.max()) + 1
    best = sampling.top(logits, most)[1][:, which[parent], rank]
    always = jnp.ones_like(best, bool)
    if siblings == "top_k":
        return Draft(best, always)

    def sampled():
        laws = sampling.to_probs(logits, context.sampling)[:, which]
        greedy = context.sampling.greedy[:, None]
        if siblings == "iid":
            tokens, real = keys.draw(DRAFT, laws[:, parent], jnp.asarray(level)), always
            laws = laws[:, parent]
        else:
            drawn, exist = keys.draw_distinct(DRAFT, laws, most, jnp.asarray(expanding) + 1)
            tokens, real = drawn[:, parent, rank], exist[:, parent, rank]
            laws = _conditional(laws, drawn)[:, parent, rank]
        return jnp.where(greedy, best, tokens), greedy | real, laws

    def greedy():
        return best, always, jnp.zeros((*best.shape, logits.shape[-1]), sampling.dtype_of(logits))

    tokens, valid, probs = jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled)
    return Draft(tokens, valid, probs=probs)


def _conditional(laws: jax.Array, drawn: jax.Array) -> jax.Array:
    """laws f[B,n,V] and the tokens i32[B,n,k] drawn without replacement -> the law of each, given those before: [B,n,k,V]."""
    out = [laws]
    for rank in range(drawn.shape[-1] - 1):
        left = jnp.where(jnp.arange(laws.shape[-1]) == drawn[..., rank, None], 0, out[-1])
        total = left.sum(-1, keepdims=True)
        out.append(left / jnp.where(total > 0, total, 1))
    return jnp.stack(out, 2)
