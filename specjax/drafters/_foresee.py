"""How much of a draft is accepted along a text of the target: block efficiency without decoding.

For ``Training.foresee`` and ``Training.ranks``. The chain rule drafts and accepts a token x with
probability min(target(x), draft(x)), and emits x with probability target(x). So an emitted token x
was an accepted draft token with probability min(1, draft(x) / target(x)). A deterministic draft is
accepted up to the first place at which the text leaves it, at any temperature and with any lossless
rule. Both are exact for text that the target itself wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling as sampling_lib
from specjax.bound import Bound
from specjax.drafters._growth.plans import Fixed, Plan
from specjax.sampling import Sampling
from specjax.topology.shapes import Topology
from specjax.types import CHAIN, Batch, ModelParams


def accept_probs(
    logits: jax.Array, target_logits: jax.Array, labels: jax.Array, sampling: Sampling
) -> jax.Array:
    """f32[B,T]: probability that the emitted token was an accepted draft token, by the chain rule.

    ``logits`` and ``target_logits`` are f[B,T,V], ``labels`` i32[B,T] the emitted tokens.
    """
    draft, target = (
        jnp.take_along_axis(sampling_lib.to_probs(x, sampling), labels[..., None], -1)[..., 0]
        for x in (logits, target_logits)
    )
    return jnp.where(
        draft < target, draft / jnp.where(target > 0, target, 1), (draft > 0).astype(draft.dtype)
    )


def rank(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """i32[B,T]: how many tokens the drafter prefers to the label.

    Of tokens with equal logits the lower id comes first, as in ``sampling.top``.
    """
    own = jnp.take_along_axis(logits, labels[..., None], -1)
    before = jnp.arange(logits.shape[-1]) < labels[..., None]
    return ((logits > own) | (logits == own) & before).sum(-1).astype(jnp.int32)


def inside_tree(ranks: Iterable[jax.Array], shape: Topology) -> list[jax.Array]:
    """bool[B,T] for each level of the tree: whether the text follows a path of nodes to this level.

    ``ranks`` has the rank i32[B,T] of the text's token at each level.
    """
    # [node + 1, rank] -> child, or -1. The last column is for ranks that the tree does not have.
    table = np.full((shape.nodes + 1, shape.branching + 1), -1, np.int32)
    for node, parent in enumerate(shape.parents):
        table[parent + 1, shape.ranks[node]] = node
    child, levels, node = jnp.asarray(table), [], None
    for each in ranks:
        node = jnp.full_like(each, -1) if node is None else node
        inside = levels[-1] if levels else jnp.ones_like(each, bool)
        node = child[node + 1, jnp.minimum(each, shape.branching)]
        levels.append(inside & (node >= 0))
    return levels


def chain_along(
    along: Callable, depth: int, params: ModelParams, batch: Batch, sampling: Sampling
) -> jax.Array:
    """f32[B,T,depth]: of a chain drawn from the drafter's probabilities.

    ``along(params, batch, depth)`` gives for each depth the labels i32[B,T], and the logits of the
    drafter and of the target f[B,T,V].
    """
    accepted = [
        accept_probs(logits, target_logits, labels, sampling)
        for labels, logits, target_logits in along(params, batch, depth)
    ]
    return jnp.stack(accepted, -1)


def tree_along(
    along: Callable, shape: Topology, params: ModelParams, batch: Batch, sampling: Sampling
) -> jax.Array:
    """f32[B,T,depth]: of the most probable tokens as a tree of this shape."""
    del sampling
    texts = along(params, batch, shape.depth)
    inside = inside_tree((rank(logits, labels) for labels, logits, _ in texts), shape)
    return jnp.stack([each.astype(jnp.float32) for each in inside], -1)


def ranks_along(along: Callable, depth: int, params: ModelParams, batch: Batch) -> jax.Array:
    """i32[B,T,depth]: ``Training.ranks``."""
    each = [rank(logits, labels) for labels, logits, _ in along(params, batch, depth)]
    return jnp.stack(each, -1)


def of_plan(along: Callable, plan: Plan) -> Callable[..., jax.Array] | None:
    """``Training.foresee`` where an entry of ``along`` belongs to the pending token.

    None for drafts of another shape in each context.
    """
    growth = plan.growth
    if not isinstance(growth, Fixed) or plan.controller is not None:
        return None
    if growth.how == "top_k":
        return Bound(tree_along, along, growth.shape)
    if growth.siblings == CHAIN:
        return Bound(chain_along, along, growth.depth)
    return None


def of_pending(values: jax.Array) -> jax.Array:
    """Entries per feature [B,T,M] -> entries per pending token: one later.

    The first pending token has no feature; its entries are 0.
    """
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0), (0, 0)))
