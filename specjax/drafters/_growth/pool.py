"""A tree whose shape depends on the context: candidates level by level, then the best of all.

EAGLE-2's dynamic tree, ReDrafter's beam search, and the best-first trees and trees of the best
parents of a stepper whose logits depend on the depth alone (``topology.dynamic``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.control import Ahead
from specjax.drafters._growth import rows as growing
from specjax.drafters._growth.plans import Pooled
from specjax.drafters._growth.rows import Job, Rows
from specjax.drafters._growth.stepper import Nodes, at
from specjax.topology import dynamic
from specjax.types import Draft


class _Pool(struct.PyTreeNode):
    """Candidate nodes: those of one level, or all."""

    tokens: jax.Array  # i32[B,P]
    total: jax.Array  # f[B,P] log-probability of the path
    score: jax.Array  # f[B,P] what it is chosen by: ``total``, or with ``families`` the parent's
    parents: jax.Array  # i32[B,P] index in the whole pool; -1: child of the pending token
    places: jax.Array  # i32[B,P] place in the block; -1: not fed
    valid: jax.Array  # bool[B,P]


class _Front(struct.PyTreeNode):
    """The nodes of a level that get children."""

    tokens: jax.Array  # i32[B,K]
    total: jax.Array  # f[B,K]
    own: jax.Array  # f[B,K] log-probability of the token itself
    index: jax.Array  # i32[B,K] in the whole pool; -1: the pending token
    place: jax.Array  # i32[B,K] in the block
    above: jax.Array  # i32[B,F] the places of the parents of all nodes that were fed, these last
    # i32[B,K,L] the tokens of the path, the node's own last; None: rows without maps of logits.
    path: jax.Array | None


class _Above(struct.PyTreeNode):
    """What the candidates of a level have from their parents."""

    places: jax.Array  # i32[B,C] places of the parents in the block
    paths: jax.Array | None  # i32[B,C,L] the parents' paths; None: rows without maps of logits
    own: jax.Array  # f[B,C] log-probability of the candidate itself, given its parent


def grow(job: Job, rows: Rows, plan: Pooled) -> tuple[Draft, jax.Array, Any, Rows]:
    """The draft, the places of its nodes i32[B,N] in the block (-1: not fed), the block, the rows.

    Scores come from the draft's own logits, without the row's temperature and cut-offs (as in the
    authors' code): these would change which tree is best, never the output law.
    """
    memory = block = job.begun.memory
    levels, size = [], 0
    front = _first(job)
    for depth, (width, top_k) in enumerate(plan.levels):
        if depth == 0:
            logits = job.begun.logits[:, None]
        elif job.stepper.independent:
            logits, memory = growing.step(job, rows, growing.any_node(job, depth), block)
        else:
            layout = tree.layout(front.above, front.tokens.shape[1])
            parents = front.above[:, -front.tokens.shape[1] :]
            nodes = Nodes(front.tokens, parents, depth, layout)
            logits, memory = growing.step(job, rows, nodes, block)
            block = memory if block is None else tree.join(block, memory)
        logits = _mapped(job, logits, front)
        exist = jnp.broadcast_to(rows.going[:, None], front.total.shape)
        sure = growing.confidence(job, memory, front.total.shape[1])
        ahead = Ahead(depth, logits, front.total, exist, front.own, sure)
        rows = growing.ask(job, rows, ahead)
        level, above = _children(front, logits, top_k, plan)
        if job.controller is not None:
            # Nodes that do not exist are the last to be chosen.
            exists = rows.going[:, None]
            level = level.replace(
                total=jnp.where(exists, level.total, -jnp.inf),
                score=jnp.where(exists, level.score, -jnp.inf),
            )
        level = level.replace(valid=jnp.broadcast_to(rows.going[:, None], level.tokens.shape))
        if plan.beams:
            level, above = at((level, above), dynamic.frontier(level.total, plan.beams))
        if width:
            front, level = _frontier(front, level, above, width, size)
        size += level.tokens.shape[1]
        levels.append(level)
    pool: _Pool = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *levels)
    if plan.beams:
        chosen, parents, kept = dynamic.paths(pool.parents, pool.valid, plan.beams, plan.nodes)
        pool = pool.replace(valid=pool.valid & kept)
    else:
        chosen, parents = dynamic.rerank(pool.score, pool.parents, plan.nodes)
    best: _Pool = at(pool, chosen)
    draft = Draft(best.tokens, best.valid, parents, finite=rows.finite, depth=plan.depth)
    return draft, best.places, block, rows


def _first(job: Job) -> _Front:
    """The pending token."""
    minus = jnp.full((job.batch, 1), -1, jnp.int32)
    total = jnp.zeros((job.batch, 1), growing.dtype_of(job.begun.logits))
    above = minus[:, : job.roots]
    path = None if job.text is None else jnp.zeros((job.batch, 1, 0), jnp.int32)
    pending = job.context.pending[:, None]
    return _Front(pending, total, total, minus, minus + job.roots, above, path)


def _mapped(job: Job, logits: jax.Array, front: _Front) -> jax.Array:
    """The logits after the nodes of the frontier, with the maps of their paths."""
    if front.path is None or not front.path.shape[2]:
        return growing.mapped(job, logits)
    batch, size, depth = front.path.shape
    own = jnp.repeat(jnp.eye(size, dtype=bool), depth, 1)
    logits = jnp.broadcast_to(logits, (batch, size, logits.shape[-1]))
    return growing.mapped(job, logits, front.path.reshape(batch, -1), own[None])


def _children(front: _Front, logits: jax.Array, top_k: int, plan: Pooled) -> tuple[_Pool, _Above]:
    """The children of the frontier, and what is known of their parents."""
    scores = growing.log_probs(logits)
    tokens, total, parent = dynamic.expand(front.total, scores, top_k, plan.most)
    known = front.index, front.place, front.path, front.total
    parents, places, paths, before = at(known, parent)
    unfed, every = jnp.full_like(tokens, -1), jnp.ones_like(tokens, bool)
    own = jnp.where(jnp.isfinite(total), total - before, -jnp.inf)
    score = before if plan.families else total
    return _Pool(tokens, total, score, parents, unfed, every), _Above(places, paths, own)


def _frontier(
    front: _Front, level: _Pool, above: _Above, width: int, size: int
) -> tuple[_Front, _Pool]:
    """The ``width`` best nodes of a level, and the level with their places.

    ``size`` is the number of candidates before this level.
    """
    best = dynamic.frontier(level.total, width)
    tokens, total, above = at((level.tokens, level.total, above), best)
    paths = above.paths
    fed = front.above.shape[1] + jnp.arange(width, dtype=jnp.int32)
    place = jnp.broadcast_to(fed, best.shape)
    places = jax.vmap(lambda row, index, to: row.at[index].set(to))(level.places, best, place)
    every = jnp.concatenate([front.above, above.places], 1)
    if paths is not None:
        paths = jnp.concatenate([paths, tokens[..., None]], 2)
    front = _Front(tokens, total, above.own, size + best, place, every, paths)
    return front, level.replace(places=places)
