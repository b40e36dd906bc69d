"""Traversal verification: the tree is judged from its leaves up, a node only after all its children fell. L1.

Weng et al. 2025 (2505.12398). To trees what block verification is to chains (on a chain it is ``block``): a path whose
weight suffices stands as a whole, though a token on it would have fallen by itself. Each child may be drawn from any law, as
long as the draft says which.

A node is entered with a weight, the share of its path's draft mass that can stand. When a child fails, its node keeps what the
target still owes there, Z = sum max(weight * target - draft, 0), and the weight becomes Z / (Z + 1 - weight).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.accept import _verdict, _walk
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict


class Visit(struct.PyTreeNode):
    """Where each row stands in the tree; index 0 is the pending token, i + 1 node i."""

    at: jax.Array  # i32[B]
    open: jax.Array  # bool[B,N] nodes not entered yet
    weight: jax.Array  # f[B,N+1]
    laws: jax.Array  # f[B,N+1,V] what the target still owes after each node, normalised
    done: jax.Array  # bool[B]


def traversal(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft`` N nodes in any topology, ``target_probs`` f32[B,N+1,V]. L1. At most 2N + 1 turns of the loop."""
    size, vocab, dtype = draft.tokens.shape[1], target_probs.shape[-1], target_probs.dtype
    if size == 0:
        return _verdict.along(draft, jnp.zeros_like(draft.tokens), keys.draw(RESIDUAL, target_probs[:, 0]))
    coins, parents = keys.coins(size, dtype), _walk.parents(draft)
    put = jax.vmap(lambda row, i, value: row.at[i].set(value))

    def turn(visit: Visit) -> Visit:
        weight, law = _verdict.at(visit.weight, visit.at), _verdict.at(visit.laws, visit.at)
        children = visit.open & (parents == visit.at[:, None] - 1)
        down = children.any(-1) & ~visit.done
        # Down: enter the next child, with the weight of its path.
        child = jnp.argmax(children, -1)
        token = jnp.clip(_verdict.at(draft.tokens, child), 0, vocab - 1)
        owed, drawn = weight * _verdict.at(law, token), _verdict.at(_verdict.law_of(draft, child, vocab, dtype), token)
        entered = jnp.where(owed >= drawn, owed > 0, owed / jnp.where(drawn > 0, drawn, 1)).astype(dtype)
        # Up: all children fell. The node stands with the chance that its weight is, or its parent is left with the rest.
        node, leaving = jnp.maximum(visit.at - 1, 0), ~down & ~visit.done
        inner = leaving & (visit.at > 0)
        stands = coins.flip(jnp.where(inner, weight, 0), jnp.where(inner, 1, 0).astype(dtype), node) | (visit.at == 0)
        fell = leaving & ~stands
        parent = jnp.where(visit.at > 0, _verdict.at(parents, node) + 1, 0)
        above, above_law = _verdict.at(visit.weight, parent), _verdict.at(visit.laws, parent)
        left, left_law = failed(above, above_law, _verdict.law_of(draft, node, vocab, dtype))

        where = jnp.where(down, child + 1, jnp.where(fell, parent, visit.at))
        value = jnp.where(down, entered, jnp.where(fell, left, weight))
        return Visit(
            at=where.astype(jnp.int32),
            open=visit.open & ~(down[:, None] & (jnp.arange(size) == child[:, None])),
            weight=put(visit.weight, where, value),
            laws=put(visit.laws, where, jnp.where(fell[:, None], left_law, _verdict.at(visit.laws, where))),
            done=visit.done | (leaving & stands),
        )

    batch = draft.tokens.shape[0]
    start = Visit(
        jnp.zeros((batch,), jnp.int32),
        draft.valid,
        jnp.ones((batch, size + 1), dtype),
        target_probs,
        jnp.zeros((batch,), bool),
    )
    end = jax.lax.while_loop(lambda v: ~v.done.all(), turn, start)
    path = tree.path_to(end.at - 1, parents, _verdict.longest(draft))
    return _verdict.along(draft, path, keys.draw(RESIDUAL, _verdict.at(end.laws, end.at)))


def failed(weight: jax.Array, law: jax.Array, draft: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weight f[B] and law f[B,V] of a node after a child drawn from ``draft`` f[B,V] and all below it fell."""
    rest = jnp.maximum(weight[:, None] * law - draft, 0)
    total = rest.sum(-1)
    safe = jnp.where(total > 0, total, 1)
    # Nothing is owed: in exact arithmetic this cannot happen at the root, and elsewhere the node cannot stand.
    weight = jnp.where(total > 0, total / (safe + 1 - weight), 0)
    return weight, jnp.where(total[:, None] > 0, rest / safe[:, None], law)


def make() -> Accept:
    """Traversal verification, in any topology."""
    return Accept(traversal, _verdict.greedy, "traversal", "L1", SIBLINGS)
