"""One draft length for the whole batch, by the acceptance of its best row.

BASS (Qian et al. 2024, 2404.15778, section 3.2): if any row accepted all drafted tokens, the next
drafts are longer; otherwise they are shorter, though not shorter than what the best row accepted,
and shrink faster in a series of such rounds. Rounds without drafts change nothing.

The length depends on all rows, so the noise of a row's drafts does too; its output law does not. On
a mesh, the rows of a device share one length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax import declare
from specjax.bound import Bound
from specjax.checks import whole
from specjax.control import _controller
from specjax.control._controller import Controller, length_of
from specjax.declare import key
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "qian2024bass"

LIMITS = True


class State(struct.PyTreeNode):
    """Equal in all rows."""

    length: Array  # i32[B]
    shrunk: Array  # i32[B] 1 if the last round made the drafts shorter


class Keys(declare.Keys, owner="bass's "):
    """The keys of ``bass``."""

    start: int = key(7, "in the first round", least=1)
    up: int = key(2, "how many levels more after a round in which a row accepted all", least=1)
    most: int = key(32, "the upper bound")
    divide: int = key(
        10,
        "a shorter draft has 1 / ``divide`` of the length less, rounded up, and one less again "
        "after a round that made it shorter",
        least=1,
    )

    def check(self) -> None:
        whole("bass's most", self.most, self.start)


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """One length for all rows, between 1 and ``most``.

    Raises:
        UserError: a number below 1, ``start`` above ``most``.
    """
    return Controller(
        f"bass:{keys.start}",
        limit=length_of,
        init=Bound(_init, keys.start),
        update=Bound(_update, keys.up, keys.most, keys.divide),
        shared=True,
    )


def _init(start: int, context: Context) -> State:
    length = jnp.full(context.length.shape, start, jnp.int32)
    return State(length, jnp.zeros_like(length))


def _update(up: int, most: int, divide: int, state: State, draft: Draft, verdict: Verdict) -> State:
    live, drafted, accepted = _controller.of_round(draft, verdict)
    # A row that was put in has a length of its own.
    length = jnp.where(live, state.length, 0).max()
    whole_draft = (live & (drafted > 0) & (accepted >= drafted)).any()
    longer = jnp.minimum(length + up, most)
    step = -(-length // divide) + jnp.where(live, state.shrunk, 0).max()
    shorter = jnp.maximum(jnp.maximum(length - step, accepted.max()), 1)
    new = State(
        jnp.full_like(state.length, jnp.where(whole_draft, longer, shorter)),
        jnp.broadcast_to(~whole_draft, state.shrunk.shape).astype(state.shrunk.dtype),
    )
    any_draft = (drafted > 0).any()
    return jax.tree.map(lambda a, b: jnp.where(any_draft, a, b), new, state)
