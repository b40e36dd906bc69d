"""What the rules share: how a verdict is put together from an accepted path, and the greedy limit."""

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
    """bool[B,N] -> i32[B]: how many stand before the first False."""
    return jnp.cumprod(passed.astype(jnp.int32), axis=-1).sum(-1)


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values [B,K,...] at index i32[B] -> [B,...]."""
    return jax.vmap(lambda row, i: row[i])(values, index)


def law_of(draft: Draft, node: jax.Array, vocab: int, dtype) -> jax.Array:
    """f[B,V]: the law that node i32[B] was drawn from; of a deterministic draft the one-hot law of its token."""
    if draft.probs is None:
        return jax.nn.one_hot(at(draft.tokens, node), vocab, dtype=dtype)
    return at(draft.probs, node)


def along(draft: Draft, path: jax.Array, token: jax.Array) -> Verdict:
    """The draft tokens on ``path`` i32[B,M] (-1 padded), then ``token`` i32[B]."""
    index = jnp.arange(path.shape[1] + 1)
    accepted = (path >= 0).sum(-1)[:, None]
    drafted = (
        jnp.take_along_axis(draft.tokens, jnp.maximum(path, 0), axis=1)
        if draft.tokens.shape[1]
        else path
    )
    drafted = jnp.pad(drafted, ((0, 0), (0, 1)))
    tokens = jnp.where(index < accepted, drafted, jnp.where(index == accepted, token[:, None], -1))
    return Verdict(
        tokens.astype(jnp.int32), (accepted[:, 0] + 1).astype(jnp.int32), path.astype(jnp.int32)
    )


def prefix(draft: Draft, accepted: jax.Array, token: jax.Array) -> Verdict:
    """The first ``accepted`` i32[B] tokens of a chain, then ``token`` i32[B]."""
    index = jnp.arange(draft.tokens.shape[1])
    return along(draft, jnp.where(index < accepted[:, None], index, -1), token)


def deepest(
    draft: Draft, passed: jax.Array, score: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The longest path whose nodes all passed (bool[B,N]): its nodes i32[B,M], and the row of the target's laws at its end.

    Between equally long ones the higher sum of ``score`` f[B,N] along the path wins, then the lower node.
    """
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
    """Keeps draft tokens while they are the target's argmax, on the longest path, then emits the argmax.

    The limit of every lossless rule at temperature 0 (card A5).
    """
    best = sampling.argmax(logits)
    if draft.parents is None:
        passed = draft.tokens == best[:, :-1]
    else:
        passed = draft.tokens == jnp.take_along_axis(best, draft.parents + 1, 1)
    path, end = deepest(draft, passed)
    return along(draft, path, at(best, end))
