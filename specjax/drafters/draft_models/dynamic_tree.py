"""A smaller language model grows a tree where it is sure of itself, another one for every context. L1 with the tree rules.

The dynamic tree of EAGLE-2 (Li et al. 2024, 2406.16858, section 4), drafted by an ordinary model. A node is worth the product
of the draft model's probabilities on its path. Level by level the ``top_k`` best nodes of the last level get ``top_k`` children
each; of all nodes ever seen, the ``nodes`` best are drafted. Cards 9 and B5.

The tree is a function of the committed text alone. The scores are the draft model's logits as they are, whatever the row's own
temperature and cut-offs (as in the authors' code): these change which tree is worth most, never the law of the output.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import sampling
from specjax.checks import whole
from specjax.drafters.draft_models import _small_model
from specjax.errors import UserError
from specjax.topology import dynamic
from specjax.types import DETERMINISTIC, LM, Draft, Drafter, Params

BEHIND = 2  # tokens that the draft cache may lack: the pending one, and the last accepted node if it was never fed


class State(struct.PyTreeNode):
    """What is carried from round to round."""

    cache: Any  # the draft model's
    fed: jax.Array  # i32[B,N] where each node of the last draft stands in the draft model's block, -1: it was never fed


class Pool(struct.PyTreeNode):
    """The nodes of one level, or of all; a frontier of k nodes has k * top_k children."""

    tokens: jax.Array  # i32[B,P]
    total: jax.Array  # f[B,P] log-probability of the path
    parents: jax.Array  # i32[B,P] places in the whole pool, -1 = child of the pending token
    above: jax.Array  # i32[B,P] where the parent stands in the block: 0 = the pending token
    fed: jax.Array  # i32[B,P] where the node itself stands in the block, less one; -1: not fed


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
        depth: levels grown, so the longest path.
        top_k: nodes of a level that get children, and how many each.
        params: the draft model's parameters when ``model`` is an ``LM``.

    Raises:
        UserError: a number below 1, more nodes than are ever seen, a top_k beyond the vocabulary, another vocabulary than
            the target's.
    """
    for name, value in (("nodes", nodes), ("depth", depth), ("top_k", top_k)):
        whole(name, value, 1)
    model, params = _small_model.load(target, model, params)
    if top_k > model.vocab_size:
        raise UserError(
            f"top_k is {top_k} and the vocabulary has {model.vocab_size} tokens; at most as many"
        )
    pool_size = top_k + (depth - 1) * top_k**2
    if nodes > pool_size:
        raise UserError(
            f"nodes is {nodes}, and depth {depth} with top_k {top_k} sees {pool_size}; "
            f"ask for at most {pool_size} nodes, or for more depth or top_k"
        )
    longest = min(depth, nodes)

    def init(params, context, target_out, slots):
        _small_model.check_positions(model, slots, nodes)
        cache = _small_model.begin(
            model, params.draft, context, slots + BEHIND + (depth - 1) * top_k
        )
        return State(cache, jnp.full((context.length.shape[0], nodes), -1, jnp.int32))

    def propose(params, keys, context, state):
        logits, cache = _small_model.catch_up(model, params.draft, context, state.cache, BEHIND)
        batch = context.length.shape[0]
        nowhere = jnp.full((batch, 1), -1, jnp.int32)
        best = Pool(
            nowhere, jnp.zeros((batch, 1), sampling.dtype_of(logits)), nowhere, nowhere, nowhere
        )
        level, finite = _grow(best, nowhere, logits[:, None], top_k)
        levels, block, size = [level], nowhere, 0
        for done in range(0, (depth - 1) * top_k, top_k):
            front = dynamic.frontier(level.total, top_k)
            best = jax.tree.map(lambda x: jnp.take_along_axis(x, front, 1), level)  # noqa: B023
            place = done + jnp.arange(top_k, dtype=jnp.int32)
            best = best.replace(fed=jnp.broadcast_to(place, front.shape))
            levels[-1] = level.replace(
                fed=jax.vmap(lambda row, at, to: row.at[at].set(to))(level.fed, front, best.fed)
            )
            block = jnp.concatenate([block, best.above], 1)
            out, cache = model.apply(params.draft, best.tokens, cache, block)
            level, good = _grow(best, size + front, out.logits, top_k)
            size += levels[-1].tokens.shape[1]
            levels.append(level)
            finite &= good
        pool: Pool = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *levels)
        chosen, parents = dynamic.rerank(pool.total, pool.parents, nodes)
        tokens, fed = (jnp.take_along_axis(x, chosen, 1) for x in (pool.tokens, pool.fed))
        draft = Draft(tokens, jnp.ones_like(tokens, bool), parents, finite=finite, depth=longest)
        return draft, State(cache, fed)

    def update(params, state, draft, verdict, target_out):
        path = jnp.take_along_axis(state.fed, jnp.maximum(verdict.path, 0), 1)
        path = jnp.where(verdict.path >= 0, path, -1)
        kept = jnp.where(verdict.count > 0, 1 + (path >= 0).sum(-1), 0)
        return state.replace(cache=model.commit(state.cache, kept, path))

    return Drafter(
        init_params=lambda key: _small_model.given("dynamic_tree", params),
        init=init,
        propose=propose,
        update=update,
        nodes=nodes,
        name="dynamic_tree",
        probs=lambda params, context: _small_model.probs(model, params.draft, context),
        siblings=DETERMINISTIC,
        depth=longest,
        gaps=False,
    )


def _grow(best: Pool, place: jax.Array, logits: jax.Array, top_k: int) -> tuple[Pool, jax.Array]:
    """The children of the frontier ``best``, whose places in the pool are i32[B,K] and logits f[B,K,V]; and whether these
    were finite, bool[B]."""
    log_probs = jax.nn.log_softmax(logits.astype(best.total.dtype), -1)
    tokens, total, parent = dynamic.expand(best.total, log_probs, top_k)
    parents, above = (jnp.take_along_axis(x, parent, 1) for x in (place, best.fed + 1))
    level = Pool(tokens, total, parents, above, jnp.full_like(tokens, -1))
    return level, jnp.isfinite(logits.max(-1)).all(-1)
