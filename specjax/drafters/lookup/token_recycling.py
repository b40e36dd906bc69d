"""Token recycling: what the target last thought would follow each token is the next draft. Deterministic, no weights, L1.

Luo et al. 2024 (2408.08696), card C7. Each row keeps a matrix of the ``top_k`` best successors of every token, as the target
saw them when it last met that token, be it in the text or in a draft that fell. A draft walks through the matrix along a tree
of fixed shape. A row starts with what ``learn`` carried over, else with nothing: it then drafts nothing.

Memory: B * V * top_k * 4 bytes (1 MB a row at V = 32 000 and top_k = 8), and once more without B for the parameters.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sampling, tree
from specjax.checks import whole
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.topology.shapes import Topology
from specjax.types import DETERMINISTIC, LM, Draft, Drafter

COUNTS = (
    8,
    21,
    25,
    15,
    8,
    3,
)  # nodes at each level of the default tree: 80, six deep, as in the original


class State(struct.PyTreeNode):
    """What a row has seen."""

    matrix: jax.Array  # i32[B,V,k] best successors of each token, the best first; -1 = unknown
    pending: jax.Array  # i32[B] the token that the current draft hangs from


def default_tree() -> Topology:
    """The 80 nodes that are most often right if every rank is half as likely to be right as the one before.

    A path is then 2^-(sum of its ranks) as likely as the path of best ranks, so each level takes the paths of the smallest
    sums below those that the level above took, and on ties those with the better rank first. The original's tree has the same
    number of nodes at each level; its choice of them was measured on one model.
    """
    level: list[tuple[int, ...]] = [()]
    names: list[tuple[int, ...]] = []
    for count in COUNTS:
        below = [(*name, rank) for name, rank in itertools.product(level, range(COUNTS[0]))]
        level = sorted(below, key=lambda name: (sum(name), name))[:count]
        names += level
    return shapes.from_ranks(names)


def make(target: LM, *, tree: Topology | str | Sequence[int] = "", top_k: int = 8) -> Drafter:
    """Drafts by walking through the target's own latest predictions.

    Args:
        target: any model; only its vocabulary's size is read.
        tree: the shape of a draft, as ``topology.parse`` reads it; "" is the tree of ``default_tree``.
        top_k: successors kept of each token; at least as many as any node of the tree has children.

    Raises:
        UserError: a shape that is none, more children than top_k, more successors than the vocabulary has tokens.
    """
    whole("top_k", top_k, 1)
    shape = default_tree() if isinstance(tree, str) and not tree else shapes.parse(tree)
    if shape.branching > top_k:
        raise UserError(
            f"top_k is {top_k} and a node of the tree has {shape.branching} children; raise it, or take a narrower tree"
        )
    if top_k > target.vocab_size:
        raise UserError(
            f"top_k is {top_k} and the vocabulary has {target.vocab_size} tokens; lower it, and take a tree as narrow"
        )
    return _build(target, shape, int(top_k))


@functools.cache  # equal arguments, the same drafter: nothing is compiled twice
def _build(target: LM, shape: Topology, top_k: int) -> Drafter:
    vocab = target.vocab_size
    parents, ranks = np.array(shape.parents), np.array(shape.ranks)

    def init_params(key):
        return {"matrix": jnp.full((vocab, top_k), -1, jnp.int32)}

    def init(params, context, target_out, slots):
        matrix = params.draft["matrix"]
        if matrix.shape != (vocab, top_k):
            raise UserError(
                f"token_recycling was given a matrix of shape {matrix.shape}, and with top_k={top_k} it is "
                f"{(vocab, top_k)}; give the parameters that this drafter made"
            )
        batch = context.length.shape[0]
        return State(
            jnp.broadcast_to(matrix, (batch, vocab, top_k)).astype(jnp.int32), context.pending
        )

    def propose(params, keys, context, state):
        batch, pending = context.length.shape[0], context.pending
        row = jnp.arange(batch)[:, None]
        above, order, levels = pending[:, None], [-1], []
        for level in shape.levels:
            nodes = list(level)
            place = np.array([order.index(parents[node]) for node in nodes])
            parent = above[:, place]
            found = state.matrix[row, jnp.clip(parent, 0, vocab - 1), ranks[nodes]]
            above, order = jnp.where(parent < 0, -1, found), nodes
            levels.append(above)
        back = np.argsort(np.concatenate(shape.levels))
        tokens = jnp.concatenate(levels, 1)[:, back]
        draft = Draft(
            tokens=tokens,
            valid=tokens >= 0,
            parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), tokens.shape),
            depth=shape.depth,
        )
        return draft, state.replace(pending=pending)

    def update(params, state, draft, verdict, target_out):
        best = sampling.top(target_out.logits, top_k)[1]
        return state.replace(
            matrix=refresh(state.matrix, state.pending, draft, verdict.path, verdict.count, best)
        )

    def learn(params, state, prompt_lengths):
        old = matrix = np.asarray(params.draft["matrix"])
        for row in np.asarray(state.draft.matrix):
            new = (row != old).any(
                -1, keepdims=True
            )  # what a row only began with must not undo what another learnt
            matrix = np.where(new & (row >= 0), row, matrix)
        return {"matrix": jnp.asarray(matrix)}

    return Drafter(
        init_params=init_params,
        init=init,
        propose=propose,
        update=update,
        nodes=shape.nodes,
        name="token_recycling",
        siblings=DETERMINISTIC,
        depth=shape.depth,
        features=True,
        learn=learn,
    )


def refresh(
    matrix: jax.Array,
    pending: jax.Array,
    draft: Draft,
    path: jax.Array,
    count: jax.Array,
    best: jax.Array,
) -> jax.Array:
    """The matrix i32[B,V,k] after a verdict (``path``, ``count``); best i32[B,N+1,k] follows the pending token and each node.

    Where several nodes carry one token, the last of them on the accepted path wins (the pending token is its beginning), else
    the node of the highest number. Nodes that do not exist, and rows that count 0, change nothing.
    """
    batch, size = draft.tokens.shape
    tokens = jnp.concatenate([pending[:, None], draft.tokens], 1)
    node = jnp.arange(size)
    accepted = (path[:, None] == node[:, None]).any(-1)
    real = tree.exists(draft.valid, draft.parents) & (count > 0)[:, None]
    accepted, real = (
        jnp.concatenate([first[:, None], rest], 1)
        for first, rest in ((count > 0, accepted), (count > 0, real))
    )
    weight = jnp.where(real, jnp.arange(size + 1) + (size + 1) * accepted, -1)
    # XLA does not say which of two writes to one place stays, so only one is made.
    beaten = ((tokens[:, :, None] == tokens[:, None]) & (weight[:, None] > weight[:, :, None])).any(
        -1
    )
    where = jnp.where(real & ~beaten, tokens, matrix.shape[1])
    return matrix.at[jnp.arange(batch)[:, None], where].set(best, mode="drop")
