"""What every rule on chains shares: how a verdict is put together, and the greedy limit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.errors import UserError
from specjax.types import Draft, Verdict


def nodes(draft: Draft) -> jax.Array:
    """bool[B,N]: which nodes exist. Raises UserError for a tree."""
    if draft.parents is not None:
        raise UserError("this acceptance rule takes chains, and the drafter drafts trees; choose a tree rule")
    return draft.valid


def first_failure(passed: jax.Array) -> jax.Array:
    """bool[B,N] -> i32[B]: how many stand before the first False."""
    return jnp.cumprod(passed.astype(jnp.int32), axis=-1).sum(-1)


def verdict(draft: Draft, accepted: jax.Array, token: jax.Array) -> Verdict:
    """The first ``accepted`` i32[B] draft tokens, then ``token`` i32[B]."""
    size = draft.tokens.shape[1]
    index = jnp.arange(size + 1)
    drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    here = accepted[:, None]
    tokens = jnp.where(index < here, drafted, jnp.where(index == here, token[:, None], -1))
    path = jnp.where(index[:size] < here, index[:size], -1)
    return Verdict(tokens.astype(jnp.int32), (accepted + 1).astype(jnp.int32), path.astype(jnp.int32))


def match(draft: Draft, chosen: jax.Array) -> Verdict:
    """Keeps draft tokens while they equal ``chosen`` i32[B,N+1], then emits the first of ``chosen`` that differs.

    With ``chosen`` the target's argmax this is the limit of every lossless rule at temperature 0 (card A5).
    """
    accepted = first_failure(nodes(draft) & (draft.tokens == chosen[:, :-1]))
    return verdict(draft, accepted, jnp.take_along_axis(chosen, accepted[:, None], 1)[:, 0])
