"""A longer draft after a round that accepted all of it, a shorter one after any other. Per row.

The schedule "heuristic" of transformers' assisted generation (Gante 2023): two tokens more, or one
token less, and never less than one. A draft that the drafter itself ended early counts as it is.
Rounds without a draft change nothing. The length starts anew with every prompt; transformers keeps
it for the next one, so that its texts depend on their order.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.checks import whole
from specjax.control import _controller
from specjax.control._controller import Controller
from specjax.declare import key
from specjax.types import Context, Draft, Verdict

REFERENCE = "gante2023assisted"

LIMITS = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys(declare.Keys):
    """The keys of ``heuristic``."""

    OWNER = "heuristic's "

    start: int = key(5, "in the first round", least=0)
    up: int = key(2, "levels more after full acceptance", least=0)
    down: int = key(1, "levels fewer after a rejection", least=0)
    least: int = key(1, "the lower bound", least=0)
    most: int = key(64, "the upper bound; the drafter's own longest draft is one too")

    def check(self) -> None:
        whole("heuristic's most", self.most, max(self.start, self.least))
        whole("heuristic's start", self.start, self.least)


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """Levels of a draft: ``up`` more after full acceptance, ``down`` fewer after a rejection.

    Raises:
        UserError: a bound below 0, ``least`` above ``most``, ``start`` outside them.
    """
    return Controller(
        f"heuristic:{keys.start}",
        limit=_itself,
        init=Bound(_init, keys.start),
        update=Bound(_update, keys),
    )


def _itself(length: jax.Array) -> jax.Array:
    return length


def _init(start: int, context: Context) -> jax.Array:
    return jnp.full(context.length.shape, start, jnp.int32)


def _update(keys: Keys, length: jax.Array, draft: Draft, verdict: Verdict) -> jax.Array:
    drafted, accepted = _controller.drafted(draft), _controller.accepted(verdict)
    longer = jnp.minimum(length + keys.up, keys.most)
    shorter = jnp.maximum(length - keys.down, keys.least)
    new = jnp.where(accepted >= drafted, longer, shorter)
    return jnp.where(drafted > 0, new, length).astype(length.dtype)
