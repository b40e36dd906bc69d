"""The same draft length in every round: the baseline of the other controllers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax.bound import Bound
from specjax.checks import whole
from specjax.control._types import ENDLESS, Controller
from specjax.types import Context

REFERENCE = "leviathan2023fast"
LIMITS = True


class Length(struct.PyTreeNode):
    """The length of every draft; a profile of costs replaces it in a state."""

    levels: jax.Array  # i32[B]


def make(*, length: int) -> Controller:
    """The same limit in every round.

    Args:
        length: of every draft, at most; 0 is plain decoding.

    Raises:
        UserError: a length below 0.
    """
    whole("the draft length", length, 0)
    return Controller(
        f"fixed:{length}",
        limit=_levels,
        init=Bound(_init, length),
        pause=ENDLESS,
    )


def _levels(state: Length) -> jax.Array:
    return state.levels


def _init(length: int, context: Context) -> Length:
    return Length(jnp.full(context.length.shape, length, jnp.int32))
