"""The draft length by the number of rows that are not finished, from a table.

vLLM's dynamic speculative decoding (``num_speculative_tokens_per_batch_size``): many rows need
their verification's time for committed tokens, few rows can afford long drafts. The user measures
which lengths are right; ``goodput`` finds them itself.

The length depends on which rows are left, so the noise of a row's drafts does too; its output law
does not. On a mesh, the rows of a device count; inside a nested drafter, the rows that its part of
the last round belongs to.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from specjax import declare
from specjax.bound import Bound
from specjax.control._controller import Controller
from specjax.declare import key
from specjax.errors import UserError
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "vllm2026dynamic"

LIMITS = True


class State(struct.PyTreeNode):
    """The rows that count."""

    live: Array  # bool[B] not finished before the last round


class Keys(declare.Keys, owner="batch_size's "):
    """The keys of ``batch_size``."""

    table: str = key(
        help='the length up to each number of rows: "64:3/128:1/129:0" is 3 up to 64 rows, 1 up to '
        "128, and 0 for more; the last one holds for more rows too"
    )


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """One length for all rows, of the table.

    Raises:
        UserError: a text that is no table, numbers of rows that do not ascend.
    """
    table = _read(keys.table)
    return Controller(
        f"batch_size:{keys.table}",
        limit=Bound(_limit, table),
        init=_init,
        update=_update,
        lengths=tuple(sorted({length for _, length in table})),
        shared=True,
    )


def _read(text: str) -> tuple[tuple[int, int], ...]:
    """The pairs of a number of rows and a length."""
    try:
        pairs = [tuple(map(int, part.split(":"))) for part in text.split("/")]
        table = tuple((rows, length) for rows, length in pairs)
    except ValueError:
        table = ()
    rows = [0, *(rows for rows, _ in table)]
    if not table or rows != sorted(set(rows)) or min(length for _, length in table) < 0:
        raise UserError(
            f"batch_size's table is {text!r}; it must be numbers of rows, ascending, each with a "
            'length of at least 0, as in "64:3/128:1"'
        )
    return table


def _init(context: Context) -> State:
    return State(~context.finished)


def _limit(table: tuple[tuple[int, int], ...], state: State) -> Array:
    rows, lengths = (jnp.asarray(column, jnp.int32) for column in zip(*table, strict=True))
    place = jnp.minimum(jnp.searchsorted(rows, state.live.sum()), len(table) - 1)
    return jnp.broadcast_to(lengths[place], state.live.shape)


def _update(state: State, draft: Draft, verdict: Verdict) -> State:
    live = verdict.count > 0
    # In a round that another drafter wrote in all rows no row has a token of this one.
    return state.replace(live=jnp.where(live.any(), live, state.live))
