"""A smaller language model drafts a tree; its shape depends on the context. L1 with tree rules.

The dynamic tree of EAGLE-2 (Li et al. 2024, 2406.16858, section 4), with an ordinary draft model.
The score of a node is the product of the draft model's probabilities on its path. Level by level,
the ``top_k`` best nodes of the last level get ``top_k`` children each; the ``nodes`` best of all
these candidates are the draft.

The tree is a function of the committed text alone. Scores come from the unchanged logits of the
draft model, without the row's temperature and cut-offs (as in the authors' code): these settings
would change which tree is best, never the output law.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import sampling
from specjax.checks import counts
from specjax.drafters.draft_models import _small_model
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.topology import dynamic
from specjax.types import (
    DETERMINISTIC,
    LM,
    Context,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Params,
    Verdict,
)

# Tokens that the draft cache may lack: the pending one, and the last accepted node if it was never
# fed.
BEHIND = 2


class State(struct.PyTreeNode):
    """What is carried from round to round."""

    # The draft model's.
    cache: Any
    # i32[B,N] place of each node of the last draft in the draft model's block, the root not
    # counted; -1: it was never fed.
    fed: jax.Array


class Pool(struct.PyTreeNode):
    """Candidate nodes: those of one level (top_k children per node of the frontier), or all."""

    tokens: jax.Array  # i32[B,P]
    total: jax.Array  # f[B,P] log-probability of the path
    parents: jax.Array  # i32[B,P] index in the whole pool; -1: child of the pending token
    above: jax.Array  # i32[B,P] place of the parent in the block, the root counted
    fed: jax.Array  # i32[B,P] place of the node in the block, the root not counted; -1: not fed


class _Setup(NamedTuple):
    """The static settings."""

    model: LM
    nodes: int
    depth: int
    top_k: int


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    nodes: int = 32,
    depth: int = 5,
    top_k: int = 6,
    params: Params = None,
) -> Drafter:
    """Drafts a dynamic tree with a small language model, in ``depth`` passes.

    Args:
        target: the model to be accelerated.
        model: the draft model: an ``LM``, or a directory in Hugging Face layout.
        nodes: size of the tree that the target verifies.
        depth: number of levels, the length of the longest path.
        top_k: number of nodes of a level that get children, and number of children of each.
        params: the draft model's parameters when ``model`` is an ``LM``.

    Raises:
        UserError: a number below 1, more nodes than candidates, a top_k beyond the vocabulary,
            another vocabulary than the target's.
    """
    counts(nodes=nodes, depth=depth, top_k=top_k)
    model, params = _small_model.load(target, model, params)
    if top_k > model.vocab_size:
        raise UserError(
            f"top_k is {top_k} and the vocabulary has {model.vocab_size} tokens; "
            f"it must be at most {model.vocab_size}"
        )
    pool_size = top_k + (depth - 1) * top_k**2
    if nodes > pool_size:
        raise UserError(
            f"nodes is {nodes}, and depth {depth} with top_k {top_k} gives {pool_size} candidates; "
            f"ask for at most {pool_size} nodes, or raise depth or top_k"
        )
    setup = _Setup(model, nodes, depth, top_k)
    return Drafter(
        init_params=functools.partial(_small_model.init_params, "dynamic_tree", params),
        init=functools.partial(_init, setup),
        propose=functools.partial(_propose, setup),
        update=functools.partial(_update, setup),
        nodes=nodes,
        name="dynamic_tree",
        probs=functools.partial(_small_model.probs, model),
        siblings=DETERMINISTIC,
        depth=min(depth, nodes),
        gaps=False,
    )


def _init(
    setup: _Setup, params: ModelParams, context: Context, target_out: Output, slots: int
) -> State:
    model, nodes, depth, top_k = setup
    _small_model.check_positions(model, slots, nodes)
    slots += BEHIND + (depth - 1) * top_k
    cache = _small_model.prefill(model, params.draft, context, slots)
    return State(cache, jnp.full((context.length.shape[0], nodes), -1, jnp.int32))


def _propose(
    setup: _Setup, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> tuple[Draft, State]:
    model, nodes, depth, top_k = setup
    logits, cache = _small_model.catch_up(model, params.draft, context, state.cache, BEHIND)
    batch = context.length.shape[0]
    none = jnp.full((batch, 1), -1, jnp.int32)
    root = Pool(none, jnp.zeros((batch, 1), sampling.dtype_of(logits)), none, none, none)
    level, finite = _children(root, none, logits[:, None], top_k)
    levels, block, size = [level], none, 0
    for fed in range(0, (depth - 1) * top_k, top_k):
        front = dynamic.frontier(level.total, top_k)
        best = _take(level, front)
        place = fed + jnp.arange(top_k, dtype=jnp.int32)
        best = best.replace(fed=jnp.broadcast_to(place, front.shape))
        levels[-1] = level.replace(
            fed=jax.vmap(lambda row, at, to: row.at[at].set(to))(level.fed, front, best.fed)
        )
        block = jnp.concatenate([block, best.above], 1)
        out, cache = model.apply(params.draft, best.tokens, cache, block)
        level, good = _children(best, size + front, out.logits, top_k)
        size += levels[-1].tokens.shape[1]
        levels.append(level)
        finite &= good
    pool: Pool = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *levels)
    chosen, parents = dynamic.rerank(pool.total, pool.parents, nodes)
    tokens, fed = (jnp.take_along_axis(x, chosen, 1) for x in (pool.tokens, pool.fed))
    valid = jnp.ones_like(tokens, bool)
    draft = Draft(tokens, valid, parents, finite=finite, depth=min(depth, nodes))
    return draft, State(cache, fed)


def _update(
    setup: _Setup,
    params: ModelParams,
    state: State,
    draft: Draft,
    verdict: Verdict,
    target_out: Output,
) -> State:
    path = jnp.take_along_axis(state.fed, jnp.maximum(verdict.path, 0), 1)
    path = jnp.where(verdict.path >= 0, path, -1)
    kept = jnp.where(verdict.count > 0, 1 + (path >= 0).sum(-1), 0)
    return state.replace(cache=setup.model.commit(state.cache, kept, path))


def _take(pool: Pool, index: jax.Array) -> Pool:
    """The nodes ``index`` i32[B,K] of a pool."""
    return jax.tree.map(lambda x: jnp.take_along_axis(x, index, 1), pool)


def _children(
    frontier: Pool, index: jax.Array, logits: jax.Array, top_k: int
) -> tuple[Pool, jax.Array]:
    """The children of the frontier, and whether their logits were finite, bool[B].

    ``index`` i32[B,K] are the frontier's places in the whole pool, ``logits`` f[B,K,V].
    """
    log_probs = jax.nn.log_softmax(logits.astype(frontier.total.dtype), -1)
    tokens, total, parent = dynamic.expand(frontier.total, log_probs, top_k)
    parents, above = (jnp.take_along_axis(x, parent, 1) for x in (index, frontier.fed + 1))
    level = Pool(tokens, total, parents, above, jnp.full_like(tokens, -1))
    return level, jnp.isfinite(logits.max(-1)).all(-1)
