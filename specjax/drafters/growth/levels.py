"""A tree of a fixed shape, grown level by level. Leaves are never fed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree
from specjax.control import Ahead
from specjax.drafters.growth import stepper as growing
from specjax.drafters.growth.plans import Fixed
from specjax.drafters.growth.siblings import draw, family
from specjax.drafters.growth.stepper import Job, Nodes, Rows
from specjax.sampling import dtype_of
from specjax.topology.shapes import Topology
from specjax.types import Array, Draft


def grow(job: Job, rows: Rows, growth: Fixed) -> tuple[Draft, Array | None, Any, Rows]:
    """A draft of this shape, ``State.places``, the block, the rows. A chain gets parents too."""
    shape = growth.shape
    block, parts, children, chances = job.begun.memory, [], shape.children, []
    # The nodes that get children in a level, their tokens, and what a controller reads of them.
    parents, tokens = [-1], job.context.pending[:, None]
    log_prob = token = jnp.zeros((job.batch, 1), dtype_of(job.begun.logits))
    exist = rows.going[:, None]
    # Places in the block: of each node and, last, the pending token; of the parents of all places.
    places, above = np.append(fed_places(shape), -1) + job.roots, [-1] * job.roots
    for depth, level in enumerate(shape.levels):
        nodes = None
        if depth and not job.stepper.independent:
            own = places[[shape.parents[node] for node in parents]]
            above += own.tolist()
            fed = jnp.broadcast_to(jnp.asarray(above, jnp.int32), (job.batch, len(above)))
            nodes = Nodes(tokens, own, depth, tree.layout(fed, len(own)))
        logits, memory, block = growing.feed(job, rows, depth, nodes, block)
        logits = _mapped(job, logits, shape, parents, parts)
        which, below = np.arange(len(parents)) % logits.shape[1], family(shape, parents)
        sure = growing.confidence(job, memory, len(parents))
        rows = growing.ask(job, rows, Ahead(depth, logits, log_prob, exist, token, sure))
        part = draw(job, rows, logits, which, below, growth.how)
        parts.append(part)
        if job.sizes:
            chances.append(growing.children_log_prob(logits, which[below.above], part.tokens))
        parents = [node for node in level if children[node + 1]]
        inner = np.array([level.index(node) for node in parents], int)
        tokens = part.tokens[:, inner]
        if job.controller is not None:
            up = below.above[inner]
            token = growing.token_log_prob(logits[:, which[up]], tokens).astype(log_prob.dtype)
            log_prob = log_prob[:, up] + token
            exist = exist[:, up] & part.valid[:, inner]
    back = np.argsort(np.array([node for level in shape.levels for node in level]))
    draft = jax.tree.map(lambda *each: jnp.concatenate(each, 1)[:, back], *parts)
    parents = jnp.broadcast_to(jnp.asarray(shape.parents, jnp.int32), (job.batch, shape.nodes))
    draft = draft.replace(parents=parents, finite=rows.finite, depth=shape.depth)
    if not job.sizes:
        return draft, None, block, rows
    draft, order, rows = growing.sized(job, rows, draft, jnp.concatenate(chances, 1)[:, back])
    return draft, jnp.asarray(fed_places(shape))[order], block, rows


def _mapped(
    job: Job, logits: Array, shape: Topology, parents: list[int], parts: list[Draft]
) -> Array:
    """The logits after the nodes ``parents``, with the maps of their paths.

    ``parts`` are the levels above. With maps, logits that are the same after all nodes of a level
    differ: the paths differ.
    """
    if job.text is None or not parts:
        return growing.mapped(job, logits)
    tokens = jnp.concatenate([part.tokens for part in parts], 1)
    order = [node for level in shape.levels[: len(parts)] for node in level]
    paths = node_paths(shape)
    visible = np.array([np.isin(order, paths[node + 1]) for node in parents])
    logits = jnp.broadcast_to(logits, (job.batch, len(parents), logits.shape[-1]))
    return growing.mapped(job, logits, tokens, jnp.asarray(visible)[None])


def fed_places(shape: Topology) -> np.ndarray:
    """i32[N]: a number for each node that is fed, in this order; -1 for a leaf."""
    children = shape.children
    inner = [node for level in shape.levels for node in level if children[node + 1]]
    places = np.full(shape.nodes, -1, np.int32)
    places[inner] = np.arange(len(inner))
    return places


def node_paths(shape: Topology) -> np.ndarray:
    """i32[N+1,depth], -1 padded: the nodes on the way to node i in entry i + 1.

    Entry 0 is the pending token's: no node.
    """
    paths = np.full((shape.nodes + 1, shape.depth), -1, np.int32)
    for node, (parent, depth) in enumerate(zip(shape.parents, shape.depths, strict=True)):
        paths[node + 1] = paths[parent + 1]
        paths[node + 1, depth - 1] = node
    return paths
