"""Drafters without a model and a state: a tree of a fixed shape, drawn from tables of logits.

They serve to test rules: nothing in them can be wrong but the few lines below, and shapes are
allowed that no method drafts (three i.i.d. siblings with two tokens).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.rng import DRAFT
from specjax.topology.shapes import Topology
from specjax.types import (
    CHAIN,
    DETERMINISTIC,
    INDEPENDENT,
    WITHOUT_REPLACEMENT,
    Draft,
    Drafter,
)


@functools.cache
def make(shape: Topology, siblings: str, holes: tuple[int, ...] = ()) -> Drafter:
    """A drafter with this shape and kind of siblings. Equal arguments give the same drafter.

    ``params.draft`` is f[K,V+1,V,V]: K tables of logits, indexed by the last two tokens of a path.
    Independent siblings of rank r are drawn from table r modulo K, all others from table 0. The
    nodes ``holes`` are never valid; their tokens are outside the vocabulary, their probs NaN.
    """
    return Drafter(
        init_params=lambda key: {},
        init=lambda params, context, target_out, slots: (),
        propose=functools.partial(_propose, shape, siblings, holes),
        update=lambda params, state, draft, verdict, target_out: state,
        nodes=shape.nodes,
        name=f"{siblings} of {shape.nodes} nodes" + (f" with {len(holes)} holes" if holes else ""),
        siblings=siblings,
        depth=None if siblings == CHAIN else shape.depth,
    )


def _propose(shape: Topology, siblings: str, holes: tuple[int, ...], params, keys, context, state):
    tables = params.draft
    vocab, batch = tables.shape[-1], context.length.shape[0]
    before = jnp.take_along_axis(context.tokens, jnp.maximum(context.length - 2, 0)[:, None], 1)
    # The last two tokens of the path that ends at each node; -1: the pending token.
    ends = {-1: (jnp.where(context.length > 1, before[:, 0], vocab), context.pending)}
    nodes: dict[int, tuple] = {}
    for parent in range(-1, shape.nodes):
        children = list(shape.children[parent + 1])
        if not children:
            continue
        above, last = ends[parent]
        each = [
            sampling.to_probs(table[above, last], context.sampling)
            for table in tables[: len(children) if siblings == INDEPENDENT else 1]
        ]
        for node, drawn in zip(children, _siblings(siblings, keys, children, each), strict=True):
            nodes[node], ends[node] = drawn, (last, drawn[0])
    tree = siblings != CHAIN
    parts = [
        jnp.stack(part, 1) for part in zip(*(nodes[n] for n in range(shape.nodes)), strict=True)
    ]
    tokens, valid, probs = parts or (
        jnp.zeros((batch, 0), jnp.int32),
        jnp.zeros((batch, 0), bool),
        jnp.zeros((batch, 0, vocab), tables.dtype),
    )
    hole = jnp.isin(jnp.arange(shape.nodes), jnp.asarray(holes, jnp.int32))
    parents = jnp.broadcast_to(jnp.asarray(shape.parents, jnp.int32), (batch, shape.nodes))
    draft = Draft(
        tokens=jnp.where(hole, -7, tokens),
        valid=valid & ~hole,
        parents=parents if tree else None,
        probs=None if siblings == DETERMINISTIC else jnp.where(hole[:, None], jnp.nan, probs),
        depth=shape.depth if tree else None,
    )
    return draft, state


def _siblings(kind: str, keys, nodes: list[int], each: list[jax.Array]) -> list[tuple]:
    """Token i32[B], existence bool[B] and probs f[B,V] of each of the siblings ``nodes``."""
    probs = each[0]
    if kind == DETERMINISTIC:
        best = sampling.top(probs, min(len(nodes), probs.shape[-1]))
        return [
            (best[1][:, rank], best[0][:, rank] > 0, probs)
            if rank < probs.shape[-1]
            else (best[1][:, 0], jnp.zeros(probs.shape[:1], bool), probs)
            for rank in range(len(nodes))
        ]
    result = []
    for rank, node in enumerate(nodes):
        own = each[rank % len(each)]
        exists = jnp.ones(own.shape[:1], bool)
        if kind == WITHOUT_REPLACEMENT:
            for token, *_ in result:
                own = jnp.where(jnp.arange(own.shape[-1]) == token[:, None], 0, own)
            total = own.sum(-1, keepdims=True)
            exists = total[:, 0] > 0
            own = jnp.where(total > 0, own / jnp.where(total > 0, total, 1), probs)
        result.append((keys.draw(DRAFT, own, node), exists, own))
    return result
