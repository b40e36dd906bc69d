"""What every rule on chains shares: how a verdict is put together, and the greedy limit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.errors import UserError
from specjax.types import Draft, Verdict


def usable(draft: Draft) -> jax.Array:
    """bool[B,N]: nodes that exist together with all before them. Raises UserError for a tree."""
    if draft.parents is not None:
        raise UserError("this acceptance rule takes chains, and the drafter drafts trees; choose a tree rule")
    return jnp.cumprod(draft.valid.astype(jnp.int32), axis=-1).astype(bool)


def verdict(draft: Draft, accepted: jax.Array, token: jax.Array) -> Verdict:
    """The first ``accepted`` i32[B] draft tokens, then ``token`` i32[B]."""
    nodes = draft.tokens.shape[1]
    index = jnp.arange(nodes + 1)
    drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    here = accepted[:, None]
    tokens = jnp.where(index < here, drafted, jnp.where(index == here, token[:, None], -1))
    path = jnp.where(index[:nodes] < here, index[:nodes], -1)
    return Verdict(tokens.astype(jnp.int32), (accepted + 1).astype(jnp.int32), path.astype(jnp.int32))


def match(draft: Draft, chosen: jax.Array) -> Verdict:
    """Keeps draft tokens while they equal ``chosen`` i32[B,N+1], then emits the first of ``chosen`` that differs.

    With ``chosen`` the target's argmax this is the limit of every lossless rule at temperature 0 (card A5).
    """
    same = usable(draft) & (draft.tokens == chosen[:, :-1])
    accepted = jnp.cumprod(same.astype(jnp.int32), axis=-1).sum(-1)
    return verdict(draft, accepted, jnp.take_along_axis(chosen, accepted[:, None], 1)[:, 0])
