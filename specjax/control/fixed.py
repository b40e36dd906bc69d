"""The same draft length in every round: the baseline of the other controllers."""

from __future__ import annotations

import operator

import jax.numpy as jnp
from flax import struct

from specjax import declare
from specjax.bound import Bound
from specjax.control._controller import ENDLESS, Controller
from specjax.declare import key
from specjax.types import Array, Context

REFERENCE = "leviathan2023fast"
LIMITS = True


class Length(struct.PyTreeNode):
    """The length of every draft; a profile of costs replaces it in a state."""

    levels: Array  # i32[B]


class Keys(declare.Keys, owner="the draft "):
    """The keys of ``fixed``."""

    length: int = key(help="of every draft, at most; 0 is plain decoding", least=0)


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """The same limit in every round.

    Raises:
        UserError: a length below 0.
    """
    return Controller(
        f"fixed:{keys.length}",
        limit=_levels,
        init=Bound(_init, keys.length),
        pause=ENDLESS,
        lengths=(keys.length,),
    )


_levels = operator.attrgetter("levels")


def _init(length: int, context: Context) -> Length:
    return Length(jnp.full(context.length.shape, length, jnp.int32))
