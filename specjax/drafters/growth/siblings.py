"""The children of nodes: the most probable tokens, or drawn from the drafter's probabilities."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.bound import Bound
from specjax.drafters.growth.stepper import Job, Rows
from specjax.rng import DRAFT
from specjax.topology.shapes import Topology
from specjax.types import (
    COUPLED,
    DETERMINISTIC,
    IID,
    WITHOUT_REPLACEMENT,
    Array,
    Draft,
)

# The values of the key "siblings" -> the kind of draft that they make.
KINDS = {kind: kind for kind in (WITHOUT_REPLACEMENT, IID, COUPLED)} | {"top_k": DETERMINISTIC}


class Family(NamedTuple):
    """Children of m nodes, ordered by node number; what does not depend on the context."""

    nodes: Array | np.ndarray  # i32[n] the children's numbers
    ranks: np.ndarray  # i32[n] their indices among their siblings
    above: np.ndarray  # i32[n] index of the parent among the m nodes
    parents: Array | np.ndarray  # i32[m] the numbers of the m nodes, -1: the pending token
    depth: Array | int  # of the m nodes, 0: the pending token


def family(shape: Topology, parents: list[int]) -> Family:
    """All children of the nodes ``parents``."""
    children, index = shape.children, {node: i for i, node in enumerate(parents)}
    nodes = np.array(sorted(child for node in parents for child in children[node + 1]), int)
    above = np.array([index[shape.parents[node]] for node in nodes])
    depth = 0 if parents == [-1] else shape.depths[parents[0]]
    return Family(nodes, np.array(shape.ranks)[nodes], above, np.array(parents), depth)


def draw(job: Job, rows: Rows, logits: Array, which: np.ndarray, level: Family, kind: str) -> Draft:
    """The children of m nodes: tokens, probs, and which of them are valid.

    ``logits`` f[B,k,V]; ``which`` [m] is the index among the k of each of the m nodes; ``kind``
    is one of ``KINDS``. With a controller nothing is drawn in rows that do not go on; their tokens
    have no meaning.
    """
    keys, context, most = job.keys, job.context, int(level.ranks.max()) + 1

    def best() -> Array:
        if most == 1:
            return sampling.argmax(logits)[:, which[level.above]]
        return sampling.top(logits, most)[1][:, which[level.above], level.ranks]

    if kind in ("top_k", "coupled"):
        tokens = best()
        if kind == "coupled":
            guess = Bound(_guess, job, logits, which, level, tokens)
            tokens = jax.lax.cond(jnp.all(context.sampling.greedy), lambda: tokens, guess)
        return Draft(tokens, jnp.ones_like(tokens, bool) & rows.going[:, None])

    def sampled() -> tuple[Array, Array, Array]:
        probs = sampling.to_probs(logits, context.sampling)[:, which]
        weights = probs
        if job.controller is not None:
            one_hot = jax.nn.one_hot(0, probs.shape[-1], dtype=probs.dtype)
            weights = jnp.where(rows.going[:, None, None], probs, one_hot)
        if kind == "iid":
            probs = probs[:, level.above]
            tokens = keys.draw(DRAFT, weights[:, level.above], jnp.asarray(level.nodes))
            valid = jnp.ones_like(tokens, bool)
        else:
            drawn, exist = keys.draw_distinct(DRAFT, weights, most, jnp.asarray(level.parents) + 1)
            tokens, valid = (x[:, level.above, level.ranks] for x in (drawn, exist))
            probs = without_replacement(probs, drawn)[:, level.above, level.ranks]
        if most == 1:
            # One child: in greedy rows its probabilities are one-hot, so it is the best token.
            return tokens, valid, probs
        greedy = context.sampling.greedy[:, None]
        return jnp.where(greedy, best(), tokens), greedy | valid, probs

    def greedy() -> tuple[Array, Array, Array]:
        tokens = best()
        probs = jnp.zeros((*tokens.shape, logits.shape[-1]), sampling.dtype_of(logits))
        return tokens, jnp.ones_like(tokens, bool), probs

    tokens, valid, probs = jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled)
    return Draft(tokens, valid & rows.going[:, None], probs=probs)


def _guess(job: Job, logits: Array, which: np.ndarray, level: Family, best: Array) -> Array:
    """i32[B,n]: children drawn with the target's noise, those of rank r with stream r."""
    how = job.context.sampling
    probs = sampling.to_probs(logits, how)[:, which[level.above]]
    tokens = job.keys.guess_coupled(level.depth, probs, level.ranks)
    return jnp.where(how.greedy[:, None], best, tokens)


def without_replacement(probs: Array, drawn: Array) -> Array:
    """f[B,n,k,V]: the probabilities of each draw, given the draws before it.

    ``probs`` f[B,n,V] are those of the first draw, ``drawn`` i32[B,n,k] the tokens in order.
    """
    each = [probs]
    for rank in range(drawn.shape[-1] - 1):
        left = jnp.where(jnp.arange(probs.shape[-1]) == drawn[..., rank, None], 0, each[-1])
        total = left.sum(-1, keepdims=True)
        each.append(left / jnp.where(total > 0, total, 1))
    return jnp.stack(each, 2)
