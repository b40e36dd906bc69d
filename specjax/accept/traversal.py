"""Traversal verification: the tree is judged from its leaves up, a node only after all its children fell. L1.

Weng et al. 2025 (2505.12398). To trees what block verification is to chains (on a chain it is ``block``): a path whose
weight suffices stands as a whole, though a token on it would have fallen by itself. Each child may be drawn from any law, as
long as the draft says which.

A node is entered with a weight, the share of its path's draft mass that can stand. When a child fails, its node keeps what the
target still owes there, Z = sum max(weight * target - draft, 0), and the weight becomes Z / (Z + 1 - weight).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    laws: Any  # f[B,N+1,V] what the target still owes after each node, normalised
    done: jax.Array  # bool[B]


def traversal(
    keys: RowKeys, draft: Draft, target_probs: jax.Array, fail: Callable | None = None
) -> Verdict:
    """The rule. ``draft`` N nodes in any topology, ``target_probs`` f32[B,N+1,V]. L1. At most N + 1 turns of the loop.

    ``fail`` is what happens to a node whose child fell (``failed``); tests put a mistake there.
    """
    fail = fail or failed
    (batch, size), vocab, dtype = draft.tokens.shape, target_probs.shape[-1], target_probs.dtype
    if size == 0:
        return _verdict.along(
            draft, jnp.zeros_like(draft.tokens), keys.draw(RESIDUAL, target_probs[:, 0])
        )
    coins, parents = keys.coins(size, dtype), _walk.parents(draft)
    put = jax.vmap(lambda row, i, value: row.at[i].set(value))
    mass = jax.vmap(lambda row, i, token: row[i, token])

    def ahead(visit: Visit) -> jax.Array:
        return visit.open & (parents == visit.at[:, None] - 1) & ~visit.done[:, None]

    def enter(visit: Visit, laws: jax.Array) -> Visit:
        """Down: each row that can enters its next child, with the weight of its path."""
        children = ahead(visit)
        down, child, weight = (
            children.any(-1),
            jnp.argmax(children, -1),
            _verdict.at(visit.weight, visit.at),
        )
        token = jnp.clip(_verdict.at(draft.tokens, child), 0, vocab - 1)
        drawn = (
            jnp.ones((batch,), dtype) if draft.probs is None else mass(draft.probs, child, token)
        )
        owed = weight * mass(laws, visit.at, token)
        entered = jnp.where(owed >= drawn, owed > 0, owed / jnp.where(drawn > 0, drawn, 1)).astype(
            dtype
        )
        where = jnp.where(down, child + 1, visit.at).astype(jnp.int32)
        return visit.replace(
            at=where,
            open=visit.open & ~(down[:, None] & (jnp.arange(size) == child[:, None])),
            weight=put(visit.weight, where, jnp.where(down, entered, weight)),
        )

    def turn(visit: Visit) -> Visit:
        # Going down looks at single numbers; only a node that falls needs whole laws, one turn of this loop for each.
        laws = visit.laws
        visit = jax.lax.while_loop(
            lambda v: ahead(v).any(), lambda v: enter(v, laws), visit.replace(laws=())
        )
        # Up: all children fell. The node stands with the chance that its weight is, or its parent is left with the rest.
        node, leaving = jnp.maximum(visit.at - 1, 0), ~visit.done
        inner = leaving & (visit.at > 0)
        weight = jnp.where(inner, _verdict.at(visit.weight, visit.at), 0)
        stands = coins.flip(weight, inner.astype(dtype), node) | (visit.at == 0)
        fell = leaving & ~stands
        parent = jnp.where(visit.at > 0, _verdict.at(parents, node) + 1, 0)
        above, above_law = _verdict.at(visit.weight, parent), _verdict.at(laws, parent)
        left, left_law = fail(above, above_law, _verdict.law_of(draft, node, vocab, dtype))
        return Visit(
            at=jnp.where(fell, parent, visit.at).astype(jnp.int32),
            open=visit.open,
            weight=put(visit.weight, parent, jnp.where(fell, left, above)),
            laws=put(laws, parent, jnp.where(fell[:, None], left_law, above_law)),
            done=visit.done | (leaving & stands),
        )

    start = Visit(
        jnp.zeros((batch,), jnp.int32),
        draft.valid,
        jnp.ones((batch, size + 1), dtype),
        target_probs,
        jnp.zeros((batch,), bool),
    )
    end = jax.lax.while_loop(lambda v: ~v.done.all(), turn, start)
    path = tree.path_to(end.at - 1, parents, draft.longest)
    return _verdict.along(draft, path, keys.draw(RESIDUAL, _verdict.at(end.laws, end.at)))


def failed(weight: jax.Array, law: jax.Array, draft: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weight f[B] and law f[B,V] of a node after a child drawn from ``draft`` f[B,V] and all below it fell."""
    rest = jnp.maximum(weight[:, None] * law - draft, 0)
    total = rest.sum(-1)
    safe = jnp.where(total > 0, total, 1)
    # Nothing is owed: in exact arithmetic this cannot happen at the root, and elsewhere the node cannot stand. (1 - weight
    # first: it is exactly 0 at the root, where a small total would drown in the 1.)
    weight = jnp.where(total > 0, total / (safe + (1 - weight)), 0)
    return weight, jnp.where(total[:, None] > 0, rest / safe[:, None], law)


def make() -> Accept:
    """Traversal verification, in any topology."""
    return Accept(traversal, _verdict.greedy, "traversal", "L1", SIBLINGS, whole=True)
