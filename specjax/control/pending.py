"""The draft length by the pending token: a table with a length for each token of the vocabulary.

Leviathan et al. 2023 (2211.17192), section 3.5, propose a length that follows a prediction of the
acceptance. Here the pending token predicts it: after some classes of tokens (a line break, a name)
a draft is easier to accept than after others, and a table gives each class its length. The pending
token is committed text, so the output law does not change. A length by the class of the *draft*
token would change it: whether a token is proposed must not depend on its own value.

The table is a list in a JSON file, entry i for the token of id i. After a token beyond its end
nothing is drafted. Inside ``escalate`` the length is that of the token after which the drafter's
own last round ended: rounds of another drafter do not change it.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import declare, files
from specjax.bound import Bound
from specjax.checks import whole
from specjax.control._controller import Controller, length_of
from specjax.declare import key
from specjax.errors import UserError
from specjax.files import buckets
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "leviathan2023fast"

LIMITS = True


class State(struct.PyTreeNode):
    """The length of the next round."""

    length: Array  # i32[B]


class Keys(declare.Keys, owner="pending's "):
    """The keys of ``pending``."""

    file: str = key(help="a JSON file with the list of the lengths by token id")


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """Levels of a draft by the pending token.

    Raises:
        UserError: a file that is missing or has no list of whole numbers of at least 0.
    """
    table = _read(keys.file)
    return Controller(
        f"pending:{keys.file}",
        limit=length_of,
        init=Bound(_init, table),
        update=Bound(_update, table),
        lengths=tuple(sorted(set(table.tolist()))),
    )


def _read(path: str) -> np.ndarray:
    """i32[n] the lengths by token id."""
    try:
        values = files.parsed(buckets.local(path).read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"pending's file {path} cannot be read: {error}") from None
    if not isinstance(values, list) or not values:
        raise UserError(f"pending's file {path} has no list; it must be one of lengths by token id")
    lengths = [
        whole(f"entry {i} of pending's file {path}", n, 0, 2**31 - 1) for i, n in enumerate(values)
    ]
    return np.asarray(lengths, np.int32)


def _init(table: np.ndarray, context: Context) -> State:
    return State(_lengths(table, context.pending))


def _update(table: np.ndarray, state: State, draft: Draft, verdict: Verdict) -> State:
    last = jnp.maximum(verdict.count - 1, 0)[:, None]
    return State(_lengths(table, jnp.take_along_axis(verdict.tokens, last, 1)[:, 0]))


def _lengths(table: np.ndarray, tokens: Array) -> Array:
    return jnp.take(jnp.asarray(table), tokens, mode="fill", fill_value=0)
