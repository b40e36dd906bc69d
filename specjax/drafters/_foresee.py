"""How much of a draft is accepted along a text of the target: block efficiency without decoding.

For ``Training.foresee`` and ``Training.ranks``. The chain rule drafts and accepts a token x with
probability min(target(x), draft(x)), and emits x with probability target(x). So an emitted token x
was an accepted draft token with probability min(1, draft(x) / target(x)). A deterministic draft is
accepted up to the first place at which the text leaves it, at any temperature and with any lossless
rule. Both are exact for text that the target itself wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax import logit_maps
from specjax import sampling as sampling_lib
from specjax.bound import Bound
from specjax.drafters.growth.plans import Fixed, Plan
from specjax.sampling import Sampling
from specjax.topology.shapes import Topology
from specjax.types import CHAIN, Array, Batch, Context, ModelParams

Texts = Iterator[tuple[Array, Array, Array]]
# (params, batch, depth) -> for each depth the labels i32[B,T], and the logits of the drafter and of
# the target f[B,T,V].
Along = Callable[[ModelParams, Batch, int], Texts]
# (params, batch) -> the drafter's logits f[B,T,V] after each token but the last; the target's too.
Logits = Callable[[ModelParams, Batch], Array]
Both = Callable[[ModelParams, Batch], tuple[Array, Array]]


def accept_probs(logits: Array, target_logits: Array, labels: Array, sampling: Sampling) -> Array:
    """f32[B,T]: probability that the emitted token was an accepted draft token, by the chain rule.

    ``logits`` and ``target_logits`` are f[B,T,V], ``labels`` i32[B,T] the emitted tokens.
    """
    probs = (sampling_lib.to_probs(x, sampling) for x in (logits, target_logits))
    draft, target = (jnp.take_along_axis(x, labels[..., None], -1)[..., 0] for x in probs)
    return jnp.where(
        draft < target, draft / jnp.where(target > 0, target, 1), (draft > 0).astype(draft.dtype)
    )


def probs_along(logits: Array, context: Context) -> Array:
    """f32[B,S,V]: ``Drafter.probs`` of the logits after each token of the context's text."""
    logits = logit_maps.along_text(context.sampling.maps, logits, context.tokens)
    return sampling_lib.to_probs(logits, context.sampling)


def rank(logits: Array, labels: Array) -> Array:
    """i32[B,T]: how many tokens the drafter prefers to the label.

    Of tokens with equal logits the lower id comes first, as in ``sampling.top``.
    """
    own = jnp.take_along_axis(logits, labels[..., None], -1)
    before = jnp.arange(logits.shape[-1]) < labels[..., None]
    return ((logits > own) | (logits == own) & before).sum(-1).astype(jnp.int32)


def inside_tree(ranks: Iterable[Array], shape: Topology) -> list[Array]:
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


def forecasts(
    along: Along, plan: Plan, *, before: int = 1, ranked: int | None = None, early: Any = None
) -> dict[str, Any]:
    """``foresee`` and ``ranks`` of ``Training``, for a drafter that grows its drafts by ``plan``.

    Args:
        along: ``along(params, batch, depth)`` gives for each depth the labels i32[B,T], and the
            logits of the drafter and of the target f[B,T,V].
        plan: the growth; for drafts of another shape in each context nothing is foreseen.
        before: how many tokens before the pending one an entry is: 0 or 1, of a feature.
        ranked: how many depths are ranked; None: those of the plan.
        early: function of a batch: bool[B,T], the entries at which nothing can be drafted; None:
            there are none.
    """
    growth, foresee, own = plan.growth, None, (along, Bound(_of_pending, before, early))
    if isinstance(growth, Fixed) and plan.controller is None:
        if growth.how == "top_k":
            foresee = Bound(_of_tree, *own, growth.shape)
        elif growth.siblings == CHAIN:
            foresee = Bound(_of_chain, *own, growth.depth)
    depth = growth.depth if ranked is None else ranked
    return {"foresee": foresee, "ranks": Bound(_ranks, *own, depth)}


def of_text(logits: Logits, both: Both, plan: Plan) -> dict[str, Any]:
    """``forecasts`` of a drafter that reads the text itself, so that depths differ by a shift.

    Only a sampled chain that does not stop early is foreseen.
    """
    growth, foresee = plan.growth, None
    sampled = isinstance(growth, Fixed) and growth.how != "top_k" and growth.siblings == CHAIN
    if sampled and plan.controller is None:
        foresee = Bound(chain_of_text, both, growth.depth)
    return {"foresee": foresee, "ranks": Bound(_ranks_of_text, logits, growth.depth)}


def chain_of_text(
    both: Both, depth: int, params: ModelParams, batch: Batch, sampling: Sampling
) -> Array:
    """f32[B,T,depth]: ``Training.foresee`` of a chain drawn from the drafter's probabilities."""
    accepted = accept_probs(*both(params, batch), batch.tokens[:, 1:], sampling)
    return _by_depth(accepted, depth, 0)


def _ranks_of_text(logits: Logits, depth: int, params: ModelParams, batch: Batch) -> Array:
    """i32[B,T,depth]: ``Training.ranks``."""
    return _by_depth(rank(logits(params, batch), batch.tokens[:, 1:]), depth, -1)


def _by_depth(values: Array, depth: int, beyond: float) -> Array:
    """[B,T] values of the token after each position -> [B,T,depth], of the next ``depth`` tokens.

    ``beyond`` is the value after the end of the text.
    """
    padded = jnp.pad(values, ((0, 0), (0, depth)), constant_values=beyond)
    return jnp.stack([padded[:, d : d + values.shape[1]] for d in range(depth)], -1)


def _of_pending(
    before: int, early: Callable | None, values: list[Array], none: int, batch: Batch
) -> Array:
    """[B,T] of each depth -> [B,T,M] of each pending token, ``none`` where it has no draft.

    ``before`` and ``early`` as in ``forecasts``: the first pending token has no feature.
    """
    found = jnp.stack(values, -1)
    if early is not None:
        found = jnp.where(early(batch)[..., None], jnp.asarray(none, found.dtype), found)
    size, more = found.shape[1], ((0, 0), (before, 0), (0, 0))
    return jnp.pad(found[:, : size - before], more, constant_values=none)


def _of_chain(
    along: Along, of_pending: Any, depth: int, params: ModelParams, batch: Batch, sampling: Sampling
) -> Array:
    """f32[B,T,depth]: ``Training.foresee`` of a chain drawn from the drafter's probabilities."""
    texts = along(params, batch, depth)
    accepted = [accept_probs(own, theirs, labels, sampling) for labels, own, theirs in texts]
    return of_pending(accepted, 0, batch)


def _of_tree(
    along: Along, of_pending: Any, shape: Topology, params: ModelParams, batch: Batch, *_: Any
) -> Array:
    """f32[B,T,depth]: ``Training.foresee`` of the most probable tokens as a tree of this shape."""
    texts = along(params, batch, shape.depth)
    inside = inside_tree((rank(logits, labels) for labels, logits, _ in texts), shape)
    return of_pending([each.astype(jnp.float32) for each in inside], 0, batch)


def _ranks(along: Along, of_pending: Any, depth: int, params: ModelParams, batch: Batch) -> Array:
    """i32[B,T,depth]: ``Training.ranks``."""
    texts = along(params, batch, depth)
    return of_pending([rank(logits, labels) for labels, logits, _ in texts], -1, batch)
