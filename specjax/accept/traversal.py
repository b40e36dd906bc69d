"""Traversal verification: nodes are tested from the leaves up, each after all its children. L1.

Weng et al. 2025 (2505.12398). It extends block verification from chains to trees (on a chain it is
``block``): a path with sufficient weight is accepted as a whole, even where the test of a single
token would reject. Each child may be drawn from any distribution that ``Draft.probs`` gives.

A node is entered with a weight, the share of its path's draft mass that can be accepted. When a
child is rejected, the parent's probs become the residual max(weight * target - draft, 0) with mass
Z, normalised, and its weight becomes Z / (Z + 1 - weight).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.accept import verdict
from specjax.rng import RESIDUAL, Coins, RowKeys
from specjax.types import UNCOUPLED, Accept, Draft, Verdict

REFERENCE = "weng2025traversal"

_put = jax.vmap(lambda row, i, value: row.at[i].set(value))
_mass = jax.vmap(lambda row, i, token: row[i, token])


class Visit(struct.PyTreeNode):
    """The position of each row in the tree; index 0 is the pending token, i + 1 is node i."""

    at: jax.Array  # i32[B]
    open: jax.Array  # bool[B,N] nodes not entered yet
    weight: jax.Array  # f[B,N+1]
    done: jax.Array  # bool[B] the path down to ``at`` is accepted


def begin(draft: Draft, target_probs: jax.Array) -> Visit:
    """A visit at the pending token."""
    batch, size = draft.tokens.shape
    weight = jnp.ones((batch, size + 1), target_probs.dtype)
    return Visit(jnp.zeros((batch,), jnp.int32), draft.valid, weight, jnp.zeros((batch,), bool))


def _open_children(visit: Visit, draft: Draft) -> jax.Array:
    """bool[B,N]: children of the current node that have not been entered."""
    children = verdict.parents(draft) == visit.at[:, None] - 1
    return visit.open & children & ~visit.done[:, None]


def _enter(visit: Visit, probs: jax.Array, draft: Draft) -> Visit:
    """Each row with an open child enters the first one, with the weight of its path."""
    (batch, size), vocab, dtype = draft.tokens.shape, probs.shape[-1], probs.dtype
    children = _open_children(visit, draft)
    down, child = children.any(-1), jnp.argmax(children, -1)
    weight = verdict.at(visit.weight, visit.at)
    token = jnp.clip(verdict.at(draft.tokens, child), 0, vocab - 1)
    drawn = jnp.ones((batch,), dtype) if draft.probs is None else _mass(draft.probs, child, token)
    owed = weight * _mass(probs, visit.at, token)
    ratio = owed / jnp.where(drawn > 0, drawn, 1)
    entered = jnp.where(owed >= drawn, owed > 0, ratio).astype(dtype)
    at = jnp.where(down, child + 1, visit.at).astype(jnp.int32)
    unseen = visit.open & ~(down[:, None] & (jnp.arange(size) == child[:, None]))
    weights = _put(visit.weight, at, jnp.where(down, entered, weight))
    return visit.replace(at=at, open=unseen, weight=weights)


def descend(visit: Visit, probs: jax.Array, draft: Draft) -> Visit:
    """Enters open children until each row is at a node that has none.

    ``probs`` f[B,N+1,V] are the remaining target probs after each node. This loop reads single
    numbers of them; only a rejected node needs whole distributions.
    """
    return jax.lax.while_loop(
        lambda v: _open_children(v, draft).any(), lambda v: _enter(v, probs, draft), visit
    )


def accepts(visit: Visit, coins: Coins) -> jax.Array:
    """bool[B]: whether the current node is accepted. Its probability is the weight; the root: 1."""
    node = jnp.maximum(visit.at - 1, 0)
    inner = ~visit.done & (visit.at > 0)
    weight = jnp.where(inner, verdict.at(visit.weight, visit.at), 0)
    return coins.flip(weight, inner.astype(weight.dtype), node) | (visit.at == 0)


def reject_child(
    weight: jax.Array, probs: jax.Array, draft_probs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weight f[B] and probs f[B,V] of a node after a child and all nodes below it were rejected.

    ``weight`` and ``probs`` are the node's before; the child was drawn from ``draft_probs`` f[B,V].
    """
    rest = jnp.maximum(weight[:, None] * probs - draft_probs, 0)
    total = rest.sum(-1)
    safe = jnp.where(total > 0, total, 1)
    # No residual: in exact arithmetic impossible at the root; another node is then never accepted.
    # (1 - weight first: it is exactly 0 at the root, where a small total would be lost in the 1.)
    weight = jnp.where(total > 0, total / (safe + (1 - weight)), 0)
    return weight, jnp.where(total[:, None] > 0, rest / safe[:, None], probs)


def leave(
    visit: Visit, probs: jax.Array, draft: Draft, accepted: jax.Array
) -> tuple[Visit, jax.Array]:
    """Ends the visit of the rows ``accepted`` bool[B]; the others return to the parent.

    Returns the visit and the remaining target probs f[B,N+1,V].
    """
    vocab, dtype = probs.shape[-1], probs.dtype
    node, running = jnp.maximum(visit.at - 1, 0), ~visit.done
    rejected = running & ~accepted
    parent = jnp.where(visit.at > 0, verdict.at(verdict.parents(draft), node) + 1, 0)
    old_weight, old_probs = verdict.at(visit.weight, parent), verdict.at(probs, parent)
    drawn = verdict.draft_probs_at(draft, node, vocab, dtype)
    new_weight, new_probs = reject_child(old_weight, old_probs, drawn)
    at = jnp.where(rejected, parent, visit.at).astype(jnp.int32)
    weight = _put(visit.weight, parent, jnp.where(rejected, new_weight, old_weight))
    visit = visit.replace(at=at, weight=weight, done=visit.done | (running & accepted))
    return visit, _put(probs, parent, jnp.where(rejected[:, None], new_probs, old_probs))


def finish(keys: RowKeys, draft: Draft, visit: Visit, probs: jax.Array) -> Verdict:
    """The path down to the accepted node, then a token drawn from its remaining probs."""
    path = tree.path_to(visit.at - 1, verdict.parents(draft), draft.longest)
    return verdict.along(draft, path, keys.draw(RESIDUAL, verdict.at(probs, visit.at)))


def traversal(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft``: N nodes, any topology; ``target_probs`` f32[B,N+1,V].

    At most N + 1 turns of the loop.
    """
    size = draft.tokens.shape[1]
    if size == 0:
        token = keys.draw(RESIDUAL, target_probs[:, 0])
        return verdict.along(draft, jnp.zeros_like(draft.tokens), token)
    coins = keys.coins(size, target_probs.dtype)

    def turn(carry):
        visit, probs = carry
        visit = descend(visit, probs, draft)
        return leave(visit, probs, draft, accepts(visit, coins))

    start = (begin(draft, target_probs), target_probs)
    visit, probs = jax.lax.while_loop(lambda carry: ~carry[0].done.all(), turn, start)
    return finish(keys, draft, visit, probs)


def make() -> Accept:
    """Traversal verification, in any topology."""
    return Accept(traversal, verdict.greedy, "traversal", "L1", UNCOUPLED, whole_tree=True)
