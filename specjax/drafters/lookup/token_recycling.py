"""Token recycling: the target's latest predictions after each token are the next draft.

Deterministic, no weights, L1. Luo et al. 2024 (2408.08696). Each row keeps a matrix of the
``top_k`` best successors of every token, from the latest target pass over that token, in the text
or in a rejected draft. A draft walks through the matrix along a tree of fixed shape. A row starts
with the matrix that ``learn`` carried over, or with an empty one; then the first draft is empty.

Memory: B * V * top_k * 4 bytes (1 MB per row at V = 32 000 and top_k = 8), and V * top_k * 4 bytes
for the parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import declare, sampling, tree
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters._limited import limited
from specjax.drafters.shared_keys import LimitedKeys
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.topology.shapes import Topology
from specjax.types import DETERMINISTIC, LM, Array, Draft, Drafter, Rare

REFERENCE = "luo2025turning"

# Nodes at each level of the default tree: 80 nodes and depth 6, as in the original.
COUNTS = (8, 21, 25, 15, 8, 3)


class State(struct.PyTreeNode):
    """The matrix of each row."""

    matrix: Array  # i32[B,V,k] best successors of each token, the best first; -1 = unknown
    pending: Array  # i32[B] the pending token at the latest draft


def default_tree() -> Topology:
    """The 80 most probable nodes if each rank is half as probable as the rank before it.

    The probability of a path is then proportional to 2^-(sum of its ranks). So each level takes the
    paths with the smallest sums below the paths of the level above, and on ties those with the
    smaller first rank. The original's tree has the same number of nodes at each level; its nodes
    were chosen by a measurement on one model.
    """
    level: list[tuple[int, ...]] = [()]
    paths: list[tuple[int, ...]] = []
    for count in COUNTS:
        below = [(*path, rank) for path, rank in itertools.product(level, range(COUNTS[0]))]
        level = sorted(below, key=lambda path: (sum(path), path))[:count]
        paths += level
    return shapes.from_ranks(paths)


class Keys(LimitedKeys):
    """The keys of ``token_recycling``."""

    LENGTH = "tree"

    tree: Topology | str | Sequence[int] = key(
        "", 'the shape of a draft, in the forms of ``topology.parse``; "" is ``default_tree``'
    )
    top_k: int = key(
        8,
        "successors kept for each token; at least the largest number of children in the tree",
        least=1,
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts by walking through the target's own latest predictions.

    Raises:
        UserError: an invalid shape, more children than top_k, top_k above the vocabulary's size.
    """
    shape = default_tree() if keys.tree == "" else shapes.parse(keys.tree)
    if shape.branching > keys.top_k:
        raise UserError(
            f"top_k is {keys.top_k} and a node of the tree has {shape.branching} children; "
            "raise top_k, or use a narrower tree"
        )
    if keys.top_k > target.vocab_size:
        raise UserError(
            f"top_k is {keys.top_k} and the vocabulary has {target.vocab_size} tokens; "
            "lower top_k, and use a tree with no more children per node"
        )
    size = target.vocab_size, keys.top_k
    drafter = Drafter(
        init_params=lambda key: {"matrix": jnp.full(size, -1, jnp.int32)},
        init=Bound(_init, size),
        propose=Bound(_propose, shape),
        update=Bound(_update, keys.top_k),
        nodes=shape.nodes,
        name="token_recycling",
        siblings=DETERMINISTIC,
        depth=shape.depth,
        features=True,
        history=True,
        rare=Rare(learn=_learn),
    )
    return limited(drafter, keys.control)


def _init(shape: tuple[int, int], params, context, *_):
    matrix = params.draft["matrix"]
    if matrix.shape != shape:
        raise UserError(
            f"token_recycling got a matrix of shape {matrix.shape}, and with "
            f"top_k={shape[1]} it is {shape}; give parameters of this drafter"
        )
    batch = context.length.shape[0]
    return State(jnp.broadcast_to(matrix, (batch, *shape)).astype(jnp.int32), context.pending)


def _propose(shape: Topology, params, keys, context, state):
    pending, last = context.pending, state.matrix.shape[1] - 1
    parents, ranks = np.array(shape.parents), np.array(shape.ranks)
    row = jnp.arange(context.length.shape[0])[:, None]
    # The tokens and the numbers of the level above; -1 is the pending token.
    above, numbers, levels = pending[:, None], [-1], []
    for level in shape.levels:
        nodes = list(level)
        parent = above[:, np.array([numbers.index(parents[node]) for node in nodes])]
        successor = state.matrix[row, jnp.clip(parent, 0, last), ranks[nodes]]
        above, numbers = jnp.where(parent < 0, -1, successor), nodes
        levels.append(above)
    tokens = jnp.concatenate(levels, 1)[:, np.argsort(np.concatenate(shape.levels))]
    valid = tokens >= 0
    above = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), tokens.shape)
    return Draft(tokens, valid, above, depth=shape.depth), state.replace(pending=pending)


def _update(top_k: int, params, state, draft, verdict, target_out):
    best = sampling.top(target_out.logits, top_k)[1]
    matrix = refresh(state.matrix, state.pending, draft, verdict.path, verdict.count, best)
    return state.replace(matrix=matrix)


def _learn(params, state, prompt_lengths):
    old = matrix = np.asarray(params.draft["matrix"])
    for row in np.asarray(state.draft.matrix):
        # Entries that a row did not change must not overwrite what another row learned.
        matrix = np.where((row != old).any(-1, keepdims=True) & (row >= 0), row, matrix)
    return {"matrix": jnp.asarray(matrix)}


def refresh(
    matrix: Array, pending: Array, draft: Draft, path: Array, count: Array, best: Array
) -> Array:
    """The matrix after a verdict.

    If several nodes have the same token, the last one on the accepted path is used (the pending
    token is the beginning of this path); if none of them is accepted, the one with the highest
    number. Nodes that do not exist, and rows with count 0, do not change the matrix.

    Args:
        matrix: i32[B,V,k].
        pending: i32[B].
        draft: the draft of the round.
        path, count: of the verdict.
        best: i32[B,N+1,k] best successors of the pending token and of each node.
    """
    batch, size = draft.tokens.shape
    tokens = jnp.concatenate([pending[:, None], draft.tokens], 1)
    node = jnp.arange(size)
    accepted = (path[:, None] == node[:, None]).any(-1)
    real = tree.exists(draft.valid, draft.parents) & (count > 0)[:, None]
    every = (count > 0)[:, None]
    accepted, real = (jnp.concatenate([every, nodes], 1) for nodes in (accepted, real))
    weight = jnp.where(real, jnp.arange(size + 1) + (size + 1) * accepted, -1)
    # XLA does not define which of two writes to the same place wins, so only one is made.
    heavier = weight[:, None] > weight[:, :, None]
    replaced = ((tokens[:, :, None] == tokens[:, None]) & heavier).any(-1)
    where = jnp.where(real & ~replaced, tokens, matrix.shape[1])
    return matrix.at[jnp.arange(batch)[:, None], where].set(best, mode="drop")
