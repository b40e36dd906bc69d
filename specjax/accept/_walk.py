"""A walk down a tree, for rules that test the children of one accepted prefix after another.

With independent siblings, several nodes may have the same tokens along their paths (copies). The
walk continues from all copies at once: the children of every copy are draws from the same
distribution, and each of them is tested.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.accept import _verdict
from specjax.types import Draft


class Walk(struct.PyTreeNode):
    """The state of a walk, per row."""

    open: jax.Array  # bool[B,N] children of the accepted prefix that have not been tested
    seen: jax.Array  # bool[B,N] all children of the accepted prefix
    # f[B,V] the distribution of the next token if none of the open nodes is accepted
    probs: jax.Array
    path: jax.Array  # i32[B,M] accepted nodes, -1 padded

    @property
    def level(self) -> jax.Array:
        """i32[B]: the number of accepted nodes."""
        return (self.path >= 0).sum(-1)


def parents(draft: Draft) -> jax.Array:
    """i32[B,N], also for a chain."""
    if draft.parents is not None:
        return draft.parents
    return jnp.broadcast_to(jnp.arange(draft.tokens.shape[1]) - 1, draft.tokens.shape)


def begin(draft: Draft, target_probs: jax.Array) -> Walk:
    """A walk at the pending token."""
    first = draft.valid & (parents(draft) < 0)
    batch = draft.tokens.shape[0]
    path = jnp.full((batch, draft.longest), -1, jnp.int32)
    return Walk(first, first, target_probs[:, 0], path)


def descend(
    walk: Walk, draft: Draft, target_probs: jax.Array, node: jax.Array, accepted: jax.Array
) -> Walk:
    """Moves the rows ``accepted`` bool[B] to ``node`` i32[B], an open node, and to its copies."""
    size = draft.tokens.shape[1]
    token = _verdict.at(draft.tokens, node)
    # bool[B,N+1]; column 0 is the pending token, which is no copy.
    copies = jnp.pad(walk.seen & (draft.tokens == token[:, None]), ((0, 0), (1, 0)))
    children = draft.valid & jnp.take_along_axis(copies, parents(draft) + 1, 1)
    place = jnp.arange(walk.path.shape[1]) == walk.level[:, None]
    moved = accepted[:, None]
    return Walk(
        open=jnp.where(moved, children, walk.open),
        seen=jnp.where(moved, children, walk.seen),
        probs=jnp.where(moved, _verdict.at(target_probs, jnp.minimum(node + 1, size)), walk.probs),
        path=jnp.where(moved & place, node[:, None], walk.path).astype(jnp.int32),
    )


def before(draft: Draft, values: jax.Array) -> jax.Array:
    """values f[B,N+1,V] at the parent of each draft node: f[B,N,V]."""
    if draft.parents is None:
        return values[:, :-1]
    return jnp.take_along_axis(values, (draft.parents + 1)[..., None], axis=1)


def depths(draft: Draft) -> jax.Array:
    """i32[B,N]: 1 for a child of the pending token."""
    return tree.depths(draft.parents, *draft.tokens.shape) + 1
