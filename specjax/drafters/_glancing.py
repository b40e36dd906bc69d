"""Glancing training of drafters that predict several tokens in one pass (GLAT, 2008.07905).

A first pass predicts without gradients. In the second one some of the answers are given: as many as
were wrong, times a rate that changes during training. What was given is not learnt.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from specjax.types import Array, Batch


def progress(batch: Batch, run_steps: int) -> Any:
    """The share of the run that is over; 0 without ``Batch.step`` or ``run_steps``."""
    if batch.step is None or not run_steps:
        return 0.0
    return batch.step[0] / run_steps


def count(wrong: Array, rate: Any) -> Array:
    """i32[B]: how many answers each row is given, for the places bool[B,T] that are wrong."""
    return jnp.floor(rate * wrong.sum(1)).astype(jnp.int32)


def first(free: Array, turn: Array, count: Array) -> Array:
    """bool[B,T]: the ``count`` i32[B] places with the lowest ``turn`` [B,T], of the ``free`` ones.

    All free places where there are fewer.
    """
    # Those that are not free come last.
    turn = jnp.where(free, turn, turn.max() + 1)
    rank = jnp.argsort(jnp.argsort(turn, 1), 1)
    return free & (rank < count[:, None])
