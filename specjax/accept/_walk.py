"""Walking down a tree: what the rules share that test the children of one accepted prefix after another.

Where siblings are independent, several nodes may carry the same tokens. The walk stands on all of them at once: the
children of every copy are draws from the same law, and each of them is tried.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.accept import _verdict
from specjax.types import Draft


class Walk(struct.PyTreeNode):
    """Where each row stands."""

    open: jax.Array  # bool[B,N] children of the accepted prefix that have not been tested
    seen: jax.Array  # bool[B,N] all children of the accepted prefix
    probs: (
        jax.Array
    )  # f[B,V] what the next token must be drawn from if none of the open ones is accepted
    path: jax.Array  # i32[B,M] accepted nodes, -1 padded

    @property
    def level(self) -> jax.Array:
        """i32[B]: how many nodes were accepted."""
        return (self.path >= 0).sum(-1)


def parents(draft: Draft) -> jax.Array:
    """i32[B,N]."""
    if draft.parents is not None:
        return draft.parents
    return jnp.broadcast_to(jnp.arange(draft.tokens.shape[1]) - 1, draft.tokens.shape)


def begin(draft: Draft, target_probs: jax.Array) -> Walk:
    """At the pending token."""
    first = draft.valid & (parents(draft) < 0)
    batch = draft.tokens.shape[0]
    path = jnp.full((batch, draft.longest), -1, jnp.int32)
    return Walk(first, first, target_probs[:, 0], path)


def descend(
    walk: Walk, draft: Draft, target_probs: jax.Array, node: jax.Array, accepted: jax.Array
) -> Walk:
    """Rows ``accepted`` bool[B] go down to ``node`` i32[B], a child of where they stand, and to all its copies."""
    size = draft.tokens.shape[1]
    token = _verdict.at(draft.tokens, node)
    copies = jnp.pad(
        walk.seen & (draft.tokens == token[:, None]), ((0, 0), (1, 0))
    )  # [B,N+1], the root is none
    children = draft.valid & jnp.take_along_axis(copies, parents(draft) + 1, 1)
    place = jnp.arange(walk.path.shape[1]) == walk.level[:, None]
    go = accepted[:, None]
    return Walk(
        open=jnp.where(go, children, walk.open),
        seen=jnp.where(go, children, walk.seen),
        probs=jnp.where(go, _verdict.at(target_probs, jnp.minimum(node + 1, size)), walk.probs),
        path=jnp.where(go & place, node[:, None], walk.path).astype(jnp.int32),
    )


def before(draft: Draft, values: jax.Array) -> jax.Array:
    """values f[B,N+1,V] at the node each draft node hangs from: f[B,N,V]."""
    if draft.parents is None:
        return values[:, :-1]
    return jnp.take_along_axis(values, (draft.parents + 1)[..., None], axis=1)


def depths(draft: Draft) -> jax.Array:
    """i32[B,N]: 1 for a child of the pending token."""
    return tree.depths(draft.parents, *draft.tokens.shape) + 1
