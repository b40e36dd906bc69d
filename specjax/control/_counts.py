"""What a round drafted and accepted, in levels, and the checks of keys that controllers share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import tree
from specjax.checks import number
from specjax.types import Draft, Verdict


def drafted(draft: Draft) -> jax.Array:
    """i32[B]: the levels of a draft, those of its deepest node; 0 for a draft without nodes."""
    batch, size = draft.tokens.shape
    if not size:
        return jnp.zeros((batch,), jnp.int32)
    exist = tree.exists(draft.valid, draft.parents)
    depth = tree.depths(draft.parents, batch, size) + 1
    return jnp.where(exist, depth, 0).max(-1).astype(jnp.int32)


def accepted(verdict: Verdict) -> jax.Array:
    """i32[B]: the accepted levels that were emitted."""
    return (verdict.path >= 0).sum(-1).astype(jnp.int32)


def share(name: str, value: Any) -> None:
    """Raises UserError unless ``value`` is a number in [0, 1]."""
    number(name, value, "between 0 and 1", lambda x: 0 <= x <= 1)


def positive(name: str, value: Any) -> None:
    """Raises UserError unless ``value`` is a number above 0."""
    number(name, value, "above 0", lambda x: x > 0)


def rows_of(context: Any) -> int:
    """The number of rows of a context."""
    return context.length.shape[0]
