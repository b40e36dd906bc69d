"""Nodes of a draft with equal paths, which the target scores once.

Draft models that agree, and independent draws, give several nodes with the same tokens from the
pending token on. The target's output is the same for all of them, so one is fed and its output is
used for each. Acceptance rules still test every node.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.types import Array, Draft


class Unique(struct.PyTreeNode):
    """A draft without duplicates."""

    draft: Draft  # the first node of each path, then nodes that are not valid; without ``probs``
    place: Array  # i32[B,N]: for each node of the whole draft, the node here with its path

    def first(self, count: int) -> Unique:
        """Without the nodes from number ``count`` on; they must not be valid."""
        return Unique(tree.first_nodes(self.draft, count), jnp.minimum(self.place, count - 1))

    def spread(self, scored: Any) -> Any:
        """What was computed for the pending token and ``draft``, for all nodes: arrays [B,N+1,...].

        For nodes that do not exist the numbers are those of another node.
        """
        place = jnp.pad(self.place + 1, ((0, 0), (1, 0)))
        return tree.take(scored, place, jnp.ones_like(place, bool))


def unique(draft: Draft) -> Unique:
    """The nodes with different paths. Nodes below one that is not valid do not exist."""
    assert draft.parents is not None, "nodes of a chain have different paths"
    existing = tree.exists(draft.valid, draft.parents)
    first = first_with_path(draft, draft.parents, existing)
    kept = existing & (first == jnp.arange(first.shape[1]))
    order = jnp.argsort(~kept, axis=1, stable=True)
    place = jnp.take_along_axis(jnp.argsort(order, axis=1), first, 1).astype(jnp.int32)
    parents = tree.of_parents(place, draft.parents)

    def ordered(array: Array) -> Array:
        return jnp.take_along_axis(array, order, 1)

    kept, parents = ordered(kept), ordered(parents)
    few = draft.replace(
        tokens=ordered(draft.tokens),
        valid=kept,
        parents=jnp.where(kept, parents, -1),
        probs=None,
        depth=draft.longest,
    )
    return Unique(few, place)


def first_with_path(draft: Draft, parents: Array, existing: Array) -> Array:
    """i32[B,N]: the first node with the path of each node; the node itself if it does not exist."""
    itself = jnp.broadcast_to(jnp.arange(parents.shape[1]), parents.shape)
    alike = draft.tokens[:, :, None] == draft.tokens[:, None]
    alike &= existing[:, :, None] & existing[:, None]
    first = itself
    # The nodes of one more level are right after each step.
    for _ in range(draft.longest):
        above = tree.of_parents(first, parents)
        equal = alike & (above[:, :, None] == above[:, None])
        first = jnp.where(existing, jnp.argmax(equal, -1), itself)
    return first
