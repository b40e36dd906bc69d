"""A tree of a fixed shape, grown level by level. Leaves are never fed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree
from specjax.control import Ahead
from specjax.drafters._growth import rows as growing
from specjax.drafters._growth.rows import Job, Rows
from specjax.drafters._growth.siblings import draw, family
from specjax.drafters._growth.stepper import Nodes
from specjax.topology.shapes import Topology
from specjax.types import Draft


def grow(job: Job, rows: Rows, shape: Topology, siblings: str) -> tuple[Draft, Any, Rows]:
    """A draft of this shape, the block, and the rows. A chain gets parents too."""
    block, parts = job.begun.memory, []
    # The nodes that get children in a level, their tokens, and what a controller reads of them.
    parents, tokens = [-1], job.context.pending[:, None]
    log_prob = jnp.zeros((job.batch, 1), growing.dtype_of(job.begun.logits))
    exist = rows.going[:, None]
    for depth, level in enumerate(shape.levels):
        if depth == 0:
            logits = job.begun.logits[:, None]
        elif job.stepper.independent:
            logits, _ = growing.step(job, rows, growing.any_node(job, depth), block)
        else:
            nodes = _nodes(job, shape, parents, tokens, depth)
            logits, memory = growing.step(job, rows, nodes, block)
            block = memory if block is None else tree.join(block, memory)
        which, below = np.arange(len(parents)) % logits.shape[1], family(shape, parents)
        rows = growing.ask(job, rows, Ahead(depth, logits, log_prob, exist))
        going = growing.drawing(job, rows)
        part = draw(job.keys, job.context, logits, which, below, siblings, going)
        part = part.replace(valid=part.valid & rows.going[:, None])
        parts.append(part)
        parents = [node for node in level if shape.children[node + 1]]
        inner = np.array([level.index(node) for node in parents], int)
        tokens = part.tokens[:, inner]
        if job.controller is not None:
            above = below.above[inner]
            path = log_prob[:, above]
            log_prob = growing.path_log_prob(path, logits[:, which[above]], tokens)
            exist = exist[:, above] & part.valid[:, inner]
    back = np.argsort(np.array([node for level in shape.levels for node in level]))
    draft = jax.tree.map(lambda *each: jnp.concatenate(each, 1)[:, back], *parts)
    above = jnp.broadcast_to(jnp.asarray(shape.parents, jnp.int32), (job.batch, shape.nodes))
    return draft.replace(parents=above, finite=rows.finite, depth=shape.depth), block, rows


def _nodes(job: Job, shape: Topology, level: list[int], tokens: jax.Array, depth: int) -> Nodes:
    """The nodes of one level that are fed."""
    places = fed_places(shape) + job.roots
    size = int(places[level].max()) + 1
    # ``paths`` of a node: its ancestors and itself, all of which were fed.
    visible = np.zeros((len(level), size), bool)
    visible[:, : job.roots] = True
    for row, node in enumerate(level):
        visible[row, places[node_paths(shape)[node + 1, :depth]]] = True
    depths = np.zeros(size, np.int32)
    for node, place in enumerate(places):
        if shape.children[node + 1] and place < size:
            depths[place] = shape.depths[node] - 1 + job.roots
    layout = tree.Layout(
        jnp.broadcast_to(jnp.asarray(visible), (job.batch, *visible.shape)),
        jnp.broadcast_to(jnp.asarray(depths), (job.batch, size)),
    )
    above = [shape.parents[node] for node in level]
    parents = np.array([places[node] if node >= 0 else job.roots - 1 for node in above])
    return Nodes(tokens, parents, depth, layout)


def fed_places(shape: Topology) -> np.ndarray:
    """i32[N]: a number for each node that is fed, in this order; -1 for a leaf."""
    inner = [node for level in shape.levels for node in level if shape.children[node + 1]]
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
