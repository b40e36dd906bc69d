"""Shared by the rules: a verdict from an accepted path, and the verdict at temperature 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import sampling, tree
from specjax.errors import UserError
from specjax.types import Draft, Verdict


def chain_nodes(draft: Draft) -> jax.Array:
    """bool[B,N]: which nodes of a chain exist. Raises UserError for a tree."""
    if draft.parents is not None:
        raise UserError(
            "this acceptance rule takes chains, and the drafter drafts trees; choose a tree rule"
        )
    return draft.valid


def first_failure(passed: jax.Array) -> jax.Array:
    """bool[B,N] -> i32[B]: the number of entries before the first False."""
    return jnp.cumprod(passed.astype(jnp.int32), axis=-1).sum(-1)


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values [B,K,...] at index i32[B] -> [B,...]."""
    return jax.vmap(lambda row, i: row[i])(values, index)


def draft_probs_at(draft: Draft, node: jax.Array, vocab: int, dtype) -> jax.Array:
    """f[B,V]: the distribution that node i32[B] was drawn from; one-hot if deterministic."""
    if draft.probs is None:
        return jax.nn.one_hot(at(draft.tokens, node), vocab, dtype=dtype)
    return at(draft.probs, node)


def along(draft: Draft, path: jax.Array, token: jax.Array) -> Verdict:
    """The draft tokens on ``path`` i32[B,M] (-1 padded), then ``token`` i32[B]."""
    index = jnp.arange(path.shape[1] + 1)
    accepted = (path >= 0).sum(-1)[:, None]
    drafted = path
    if draft.tokens.shape[1]:
        drafted = jnp.take_along_axis(draft.tokens, jnp.maximum(path, 0), axis=1)
    drafted = jnp.pad(drafted, ((0, 0), (0, 1)))
    tokens = jnp.where(index < accepted, drafted, jnp.where(index == accepted, token[:, None], -1))
    count = accepted[:, 0] + 1
    return Verdict(tokens.astype(jnp.int32), count.astype(jnp.int32), path.astype(jnp.int32))


def prefix(draft: Draft, accepted: jax.Array, token: jax.Array) -> Verdict:
    """The first ``accepted`` i32[B] tokens of a chain, then ``token`` i32[B]."""
    index = jnp.arange(draft.tokens.shape[1])
    return along(draft, jnp.where(index < accepted[:, None], index, -1), token)


def deepest(
    draft: Draft, passed: jax.Array, score: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The longest path of nodes that all passed (bool[B,N]).

    Between equally long paths the higher sum of ``score`` f[B,N] along the path wins, then the
    lower node. Returns its nodes i32[B,M], and the index i32[B] of its end in the target's output
    (0 is the pending token).
    """
    if not draft.tokens.shape[1]:
        batch = draft.tokens.shape[0]
        return jnp.full((batch, draft.longest), -1, jnp.int32), jnp.zeros((batch,), jnp.int32)
    alive = tree.exists(draft.valid & passed, draft.parents)
    if draft.parents is None:
        count = alive.sum(-1)
        index = jnp.arange(alive.shape[1])
        return jnp.where(index < count[:, None], index, -1).astype(jnp.int32), count
    inside = tree.ancestors(draft.parents)
    depth = jnp.where(alive, inside.sum(-1), 0)
    best = depth == depth.max(-1, keepdims=True)
    if score is not None:
        total = jnp.where(inside, jnp.where(draft.valid, score, 0)[:, None], 0).sum(-1)
        total = jnp.where(best, total, -jnp.inf)
        best &= total == total.max(-1, keepdims=True)
    end = jnp.where(alive.any(-1), jnp.argmax(best, -1), -1)
    return tree.path_to(end, draft.parents, draft.longest), end + 1


def greedy(draft: Draft, logits: jax.Array) -> Verdict:
    """Accepts draft tokens while they are the target's argmax, on the longest path.

    Then emits the argmax after them. The limit of every lossless rule at temperature 0.
    """
    best = sampling.argmax(logits)
    if draft.parents is None:
        passed = draft.tokens == best[:, :-1]
    else:
        passed = draft.tokens == jnp.take_along_axis(best, draft.parents + 1, 1)
    path, end = deepest(draft, passed)
    return along(draft, path, at(best, end))
