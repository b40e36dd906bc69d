"""A longer draft after a round that accepted all of it, a shorter one after any other. Per row.

The schedule "heuristic" of transformers' assisted generation (Gante 2023): two tokens more, or one
token less, and never less than one. A draft that the drafter itself ended early counts as it is.
Rounds without a draft change nothing. The length starts anew with every prompt; transformers keeps
it for the next one, so that its texts depend on their order.

With a window the mean accepted share of the last rounds decides: "heuristic:4,up=1,window=10,
above=0.8,below=0.5" drafts one token more from 0.8 on, and one less below 0.5.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from specjax import declare, tree
from specjax.bound import Bound
from specjax.checks import whole
from specjax.control import _controller
from specjax.control._controller import Controller, length_of
from specjax.declare import key
from specjax.errors import UserError
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "gante2023assisted"

LIMITS = True


class State(struct.PyTreeNode):
    """The length, and the accepted shares of the last rounds with a draft."""

    length: Array  # i32[B]
    shares: Array  # f32[B,window] the newest last; -1: there was no such round yet


class Keys(declare.Keys, owner="heuristic's "):
    """The keys of ``heuristic``."""

    start: int = key(5, "in the first round", least=0)
    up: int = key(2, "levels more", least=0)
    down: int = key(1, "levels fewer", least=0)
    least: int = key(1, "the lower bound", least=0)
    most: int = key(64, "the upper bound; the drafter's own longest draft is one too")
    window: int = key(1, "rounds with a draft over which the accepted share is a mean", least=1)
    above: float = key(1.0, "``up`` more from this mean on", least=0)
    below: float = key(1.0, "``down`` fewer below this mean, at most ``above``", least=0)

    def check(self) -> None:
        if not self.below <= self.above <= 1:
            raise UserError(
                f"heuristic's above is {self.above} and below {self.below}; they must be shares, "
                "below no larger than above"
            )
        whole("heuristic's most", self.most, max(self.start, self.least))
        whole("heuristic's start", self.start, self.least)


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """Levels of a draft: ``up`` more after full acceptance, ``down`` fewer after a rejection.

    Raises:
        UserError: a bound below 0, ``least`` above ``most``, ``start`` outside them, ``below``
            above ``above``.
    """
    init, update = Bound(_init, keys), Bound(_update, keys)
    return Controller(f"heuristic:{keys.start}", limit=length_of, init=init, update=update)


def _init(keys: Keys, context: Context) -> State:
    length = jnp.full(context.length.shape, keys.start, jnp.int32)
    return State(length, jnp.full((*length.shape, keys.window), -1.0))


def _update(keys: Keys, state: State, draft: Draft, verdict: Verdict) -> State:
    drafted, accepted = _controller.drafted(draft), _controller.accepted(verdict)
    share = (accepted / jnp.maximum(drafted, 1)).astype(state.shares.dtype)
    shares = jnp.concatenate([state.shares[:, 1:], share[:, None]], 1)
    seen = shares >= 0
    mean = jnp.where(seen, shares, 0).sum(1) / jnp.maximum(seen.sum(1), 1)
    longer = jnp.minimum(state.length + keys.up, keys.most)
    shorter = jnp.maximum(state.length - keys.down, keys.least)
    # A mean of shares is rounded; a tie counts as one.
    length = jnp.where(mean < keys.below - 1e-6, shorter, state.length)
    length = jnp.where(mean >= keys.above - 1e-6, longer, length)
    new = State(length.astype(state.length.dtype), shares)
    return tree.where_rows(drafted > 0, new, state)
