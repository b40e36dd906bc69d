"""A longer draft after a round that accepted all of it, a shorter one after any other. Per row.

The schedule "heuristic" of transformers' assisted generation (Gante 2023): two tokens more, or one
token less, and never less than one. A draft that the drafter itself ended early counts as it is.
Rounds without a draft change nothing. The length starts anew with every prompt; transformers keeps
it for the next one, so that its texts depend on their order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import whole
from specjax.control import _counts
from specjax.control._types import Controller
from specjax.types import Context, Draft, Verdict

REFERENCE = "gante2023assisted"

LIMITS = True


def make(
    *, start: int = 5, up: int = 2, down: int = 1, least: int = 1, most: int = 64
) -> Controller:
    """Levels of a draft: ``up`` more after full acceptance, ``down`` fewer after a rejection.

    Args:
        start: in the first round.
        up, down: the steps.
        least, most: the bounds; the drafter's own longest draft is a bound too.

    Raises:
        UserError: a bound below 0, ``least`` above ``most``, ``start`` outside them.
    """
    for name, value in {"start": start, "up": up, "down": down, "least": least}.items():
        whole(f"heuristic's {name}", value, 0)
    whole("heuristic's most", most, max(start, least))
    whole("heuristic's start", start, least)
    return Controller(
        f"heuristic:{start}",
        limit=_itself,
        init=Bound(_init, start),
        update=Bound(_update, up, down, least, most),
    )


def _itself(length: jax.Array) -> jax.Array:
    return length


def _init(start: int, context: Context) -> jax.Array:
    return jnp.full(context.length.shape, start, jnp.int32)


def _update(
    up: int, down: int, least: int, most: int, length: jax.Array, draft: Draft, verdict: Verdict
) -> jax.Array:
    drafted, accepted = _counts.drafted(draft), _counts.accepted(verdict)
    longer, shorter = jnp.minimum(length + up, most), jnp.maximum(length - down, least)
    new = jnp.where(accepted >= drafted, longer, shorter)
    return jnp.where(drafted > 0, new, length).astype(length.dtype)
