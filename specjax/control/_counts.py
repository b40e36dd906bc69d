"""What a round drafted and accepted, in levels, and what else controllers share."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Mover(NamedTuple):
    """How Draft & Verify moves a threshold towards the acceptance that is aimed at."""

    target: (
        float  # the share of accepted tokens at which the threshold moves from rising to falling
    )
    step: float  # how far the aim is from the threshold
    keep: float  # share of the old threshold in the new one
    memory: float  # share of the earlier rounds in the mean of the accepted shares

    def check(self, name: str) -> None:
        """Raises UserError for a number outside [0, 1], of the controller ``name``."""
        for field, value in self._asdict().items():
            share(f"{name}'s {field}", value)

    def moved(
        self, threshold: jax.Array, mean: jax.Array, newest: jax.Array, falls: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The new threshold and the new mean of the accepted shares, f32[B].

        Args:
            threshold, mean: f32[B] the old ones.
            newest: f32[B] the accepted share of the last round.
            falls: bool[B] whether the threshold may fall; otherwise it rises or stays.
        """
        mean = self.memory * mean + (1 - self.memory) * newest
        lower = jnp.where(falls, threshold - self.step, threshold)
        aim = jnp.where(mean < self.target, threshold + self.step, lower)
        moved = jnp.clip(self.keep * threshold + (1 - self.keep) * aim, 0, 1)
        return moved.astype(jnp.float32), mean.astype(jnp.float32)


def share(name: str, value: Any) -> None:
    """Raises UserError unless ``value`` is a number in [0, 1]."""
    number(name, value, "between 0 and 1", lambda x: 0 <= x <= 1)


def positive(name: str, value: Any) -> None:
    """Raises UserError unless ``value`` is a number above 0."""
    number(name, value, "above 0", lambda x: x > 0)


def rows_of(context: Any) -> int:
    """The number of rows of a context."""
    return context.length.shape[0]
