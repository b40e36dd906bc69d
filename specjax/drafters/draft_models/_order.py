"""A draft tree with its siblings in a random order.

SpecInfer's rule tests the children of a node in a random order (Miao et al. 2024, 2305.09781,
algorithm 2); rules here test them in the order of the nodes. So the nodes of each level are put in
a random order, which does not depend on their tokens: the output law does not change.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.rng import DRAFT, RowKeys
from specjax.types import Draft


def shuffled(
    keys: RowKeys, draft: Draft, levels: Sequence[Sequence[int]]
) -> tuple[Draft, jax.Array]:
    """The draft with the nodes of each level in a random order, per row.

    ``levels`` are the numbers of the nodes by depth. Returns the draft, and i32[B,N]: which node is
    now at each place.
    """
    parts, batch = [], len(draft.tokens)
    for depth, level in enumerate(levels):
        weights = jnp.ones((batch, len(level)), jnp.result_type(float))
        places = keys.draw_distinct(DRAFT, weights, len(level), depth)[0]
        parts.append(jnp.asarray(np.array(level), jnp.int32)[places])
    order = jnp.concatenate(parts, 1)
    assert draft.parents is not None
    above = jnp.take_along_axis(draft.parents, order, 1)
    place = jnp.argsort(order, 1).astype(jnp.int32)
    parents = jnp.take_along_axis(place, jnp.maximum(above, 0), 1)
    probs = draft.probs
    if probs is not None:
        probs = jnp.take_along_axis(probs, order[..., None], 1)
    tokens, valid = (jnp.take_along_axis(x, order, 1) for x in (draft.tokens, draft.valid))
    parents = jnp.where(above < 0, -1, parents)
    return draft.replace(tokens=tokens, valid=valid, parents=parents, probs=probs), order


def restored(values: jax.Array, order: jax.Array) -> jax.Array:
    """[B,N] values of the places, as values of the nodes; ``order`` of ``shuffled``."""
    return jnp.take_along_axis(values, jnp.argsort(order, 1), 1)
