"""All outcomes of a function that gets its randomness from ``RowKeys``.

``expand`` runs it with a ``Script`` in place of ``RowKeys`` until every history has been run once;
the probabilities of the histories add up to 1. jit is off meanwhile, so that loops run in Python
and the script can read values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.testing.script import Branches, Pending, Script

# Rows of every run: one number, because every new shape compiles every operation again.
ROWS = 4096
# Histories of one function.
LARGEST = 4_000_000


class TooLarge(ValueError):
    """There are too many histories to enumerate."""


class Expanded(NamedTuple):
    """Every history of a function."""

    value: Any  # what the function returned, a row per history
    source: np.ndarray  # i64[R] the row that each history began from
    chance: np.ndarray  # f64[R] its probability, given that row
    ledger: frozenset[tuple] = frozenset()  # the noise that was requested


def expand(function: Callable, rows: Any, batch: int, ledger: Iterable[tuple] = ()) -> Expanded:
    """All outcomes of ``function(script, rows)``; ``rows`` is a pytree of arrays [batch, ...].

    ``ledger`` is noise that was requested before, in the same round. The order of the histories is
    arbitrary.
    """
    waiting = Pending(np.arange(batch), np.zeros((batch, 8), np.int32), np.zeros(batch, np.int64))
    runs: list[tuple[Any, np.ndarray, np.ndarray]] = []
    requested, count = frozenset(ledger), 0
    while len(waiting.source):
        waiting, now = waiting.split(ROWS)
        branches = Branches(now, ROWS)
        script = Script(branches, ledger)
        given = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[branches.source]), rows)  # noqa: B023
        with jax.disable_jit():
            value = function(script, given)
        waiting = Pending.join([waiting, *branches.pending()])
        kept = branches.histories
        value = jax.tree.map(lambda x: np.asarray(x)[kept], value)  # noqa: B023
        runs.append((value, branches.source[kept], branches.chance[kept]))
        requested, count = requested | script.ledger, count + len(kept)
        if count + len(waiting.source) > LARGEST:
            raise TooLarge(
                f"more than {LARGEST} histories; take a smaller vocabulary or a smaller draft"
            )
    values, sources, chances = zip(*runs, strict=True)
    value = jax.tree.map(lambda *x: np.concatenate(x), *values)
    return Expanded(value, np.concatenate(sources), np.concatenate(chances), requested)
