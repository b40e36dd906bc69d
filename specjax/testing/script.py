"""Scripted randomness: a replacement for ``RowKeys`` that walks through every outcome.

Rules and drafters get all their randomness from ``RowKeys``: coins, draws, draws without
replacement. A ``Script`` answers the same requests, but each row gets an outcome chosen by
``Branches``, so that a few runs of the real code cover every history with its probability.

The script also keeps a ledger: noise that is requested twice in one round (the same purpose and
index) is an error, because the outcomes would not be independent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import rng


class NotEnumerable(TypeError):
    """The outcomes cannot be listed: raw noise (``at_round``, ``base``), or rows that interact.

    Test such code by counting (``testing.loop_fit``).
    """


class NoiseReused(AssertionError):
    """The same noise was requested twice in one round."""


class ImpossibleProbs(AssertionError):
    """The weights of a draw or a coin are negative, not finite, or all zero."""


class Pending(NamedTuple):
    """Histories that have not been run: each is a starting row and its first choices."""

    source: np.ndarray  # i64[W] the row that the history begins from
    choices: np.ndarray  # i32[W,C] its first outcomes, only where at least two are possible
    given: np.ndarray  # i64[W] how many of the C outcomes are set

    def split(self, count: int) -> tuple[Pending, Pending]:
        """The histories but the last ``count``, and these."""
        rest = max(len(self.source) - count, 0)
        return Pending(*(x[:rest] for x in self)), Pending(*(x[rest:] for x in self))

    @staticmethod
    def join(parts: list[Pending]) -> Pending:
        """All histories of the parts."""
        width = max(part.choices.shape[1] for part in parts)
        choices = [np.pad(p.choices, ((0, 0), (0, width - p.choices.shape[1]))) for p in parts]
        return Pending(
            np.concatenate([part.source for part in parts]),
            np.concatenate(choices),
            np.concatenate([part.given for part in parts]),
        )


class Branches:
    """Gives every row of one run a history, and lists the histories that still have to be run.

    The rows that have had the same outcomes so far are a group; they are neighbours. At each
    request a group is divided among the possible outcomes. A group with fewer rows than outcomes
    takes the first ones; the others become pending and start again from the beginning in a later
    run, with their choices so far.

    Attributes:
        source: i64[R], the starting row of each row.
        chance: f64[R], the probability of each row's history, given its starting row.
    """

    def __init__(self, histories: Pending, rows: int):
        item = np.arange(rows) * len(histories.source) // rows
        self.source, self._given = histories.source[item], histories.given[item]
        self._choices = histories.choices[item]
        self._used = np.zeros(rows, np.int64)
        self._first = np.append(True, item[1:] != item[:-1])
        self._later: list[Pending] = []
        self.chance = np.ones(rows)

    @property
    def histories(self) -> np.ndarray:
        """i64[H]: one row of each history."""
        return np.flatnonzero(self._first)

    def pending(self) -> list[Pending]:
        """The histories that had no row in this run, which is complete."""
        self._check((self._used >= self._given).all())
        return self._later

    def choose(self, weights: np.ndarray) -> np.ndarray:
        """One outcome i32[R] per row, from unnormalised weights f64[R,K]."""
        total = weights.sum(-1, keepdims=True)
        if not np.isfinite(total).all() or (total <= 0).any() or (weights < 0).any():
            raise ImpossibleProbs("a draw from weights that are NaN, negative or all zero")
        row, possible = np.arange(len(weights)), weights > 0
        outcomes = possible.sum(-1)
        open_, repeated = outcomes > 1, self._used < self._given
        if self._used.max() == self._choices.shape[1]:
            self._choices = np.pad(self._choices, ((0, 0), (0, 8)))
        # Divide each group evenly: rows that repeat a choice stay together.
        group = np.cumsum(self._first) - 1
        start, size = np.flatnonzero(self._first)[group], np.bincount(group)[group]
        rank = np.where(size >= outcomes, (row - start) * outcomes // size, row - start)
        rank = np.where(open_ & ~repeated, rank, 0)
        value = np.where(open_ & repeated, self._choices[row, self._used], _nth(possible, rank))
        self._check((value < weights.shape[1]).all() and possible[row, value].all())
        self._postpone(np.flatnonzero(self._first & ~repeated & (outcomes > size)), size, possible)
        self._choices[row[open_], self._used[open_]] = value[open_]
        self._used += open_
        self._first = self._first | np.append(True, rank[1:] != rank[:-1])
        self.chance *= weights[row, value] / total[:, 0]
        return value.astype(np.int32)

    def _postpone(self, rows: np.ndarray, size: np.ndarray, possible: np.ndarray) -> None:
        """Makes the outcomes pending for which the groups that begin at ``rows`` are too small."""
        if not len(rows):
            return
        extra = possible[rows].sum(-1) - size[rows]
        rank = np.arange(extra.sum()) - np.repeat(np.cumsum(extra) - extra, extra)
        rows = np.repeat(rows, extra)
        choices = self._choices[rows]
        used = self._used[rows]
        choices[np.arange(len(rows)), used] = _nth(possible[rows], size[rows] + rank)
        self._later.append(Pending(self.source[rows], choices, used + 1))

    @staticmethod
    def _check(repeatable) -> None:
        if not repeatable:
            raise NotEnumerable("what a row may draw depends on other rows; test it by counting")


def _nth(possible: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """i64[R]: the position of the ``rank``-th True in each row of bool[R,K]."""
    return np.argmax(possible & (np.cumsum(possible, -1) == rank[:, None] + 1), -1)


class Script:
    """Replaces ``RowKeys`` in one run: ``Branches`` chooses the outcomes of every request."""

    def __init__(self, branches: Branches, ledger: Iterable[tuple] = ()):
        self.branches, self.batch, self.ledger = branches, len(branches.source), set(ledger)

    def coins(self, count: int, dtype=jnp.float32) -> _Coins:
        self._enter(("coins",))
        return _Coins(self, count)

    def draw(self, purpose: int, weights: jax.Array, index=None) -> jax.Array:
        if purpose == rng.ACCEPT:
            raise NoiseReused("a token was drawn with the purpose of the coins")
        masses = np.asarray(weights, np.float64)
        if masses.ndim == 2:
            self._enter((purpose, None if index is None else int(index)))
            return self._one(masses)
        columns = []
        for place, number in enumerate(np.asarray(index).tolist()):
            self._enter((purpose, number))
            columns.append(self._one(masses[:, place]))
        return jnp.stack(columns, 1)

    def draw_at(self, depth, weights: jax.Array, active: jax.Array | None = None) -> jax.Array:
        self._enter(("position", int(depth)))
        masses = np.asarray(weights, np.float64)
        if active is not None:
            masses = np.where(np.asarray(active)[:, None], masses, np.eye(1, masses.shape[1]))
        return self._one(masses)

    def draw_distinct(
        self, purpose: int, weights: jax.Array, count: int, index=None
    ) -> tuple[jax.Array, jax.Array]:
        masses = np.asarray(weights, np.float64)
        flat = masses[:, None] if masses.ndim == 2 else masses
        numbers = [None] if index is None else np.atleast_1d(np.asarray(index)).tolist()
        tokens = np.zeros((*flat.shape[:2], count), np.int32)
        exist = np.zeros(tokens.shape, bool)
        for place, number in enumerate(numbers):
            self._enter((purpose, number))
            left = flat[:, place].copy()
            for rank in range(count):
                some = left.sum(-1) > 0
                token = np.asarray(
                    self._one(np.where(some[:, None], left, np.eye(1, left.shape[1])))
                )
                tokens[:, place, rank], exist[:, place, rank] = token, some
                left[np.arange(len(left)), token] = 0
        if masses.ndim == 2:
            return jnp.asarray(tokens[:, 0]), jnp.asarray(exist[:, 0])
        return jnp.asarray(tokens), jnp.asarray(exist)

    def inner(self, index: int | jax.Array, same_target: bool = False) -> _Inner:
        return _Inner(self, int(index), same_target)

    def __getattr__(self, name: str):
        raise NotEnumerable(f"RowKeys.{name} is raw noise; only coins and draws can be enumerated")

    def _enter(self, place: tuple) -> None:
        if place in self.ledger:
            raise NoiseReused(f"the noise {place} was requested twice in one round")
        self.ledger.add(place)

    def _one(self, weights: np.ndarray) -> jax.Array:
        """One outcome per row, from unnormalised weights f64[R,K]."""
        return jnp.asarray(self.branches.choose(weights))


class _Inner(Script):
    """The keys of one part of a drafter: its own places in the ledger of the outer script."""

    def __init__(self, outer: Script, index: int, same_target: bool):
        self.outer, self.index, self.same_target = outer, index, same_target
        self.batch = outer.batch

    def _enter(self, place: tuple) -> None:
        shared = self.same_target and place[0] == "position"
        self.outer._enter(place if shared else (self.index, *place))

    def _one(self, weights: np.ndarray) -> jax.Array:
        return self.outer._one(weights)


class _Coins:
    def __init__(self, script: Script, count: int):
        self.script, self.tossed = script, np.zeros((script.batch, count), bool)

    def flip(self, kept: jax.Array, total: jax.Array, node: jax.Array | None = None) -> jax.Array:
        above, below = np.broadcast_arrays(
            np.asarray(kept, np.float64), np.asarray(total, np.float64)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            chance = np.where(above >= below, (above > 0) * 1.0, above / below)
        if np.isnan(chance).any() or (above < 0).any():
            raise ImpossibleProbs("a coin with NaN or negative masses")
        if node is not None:
            return self._toss(chance, np.asarray(node))
        columns = [
            self._toss(chance[:, i], np.full(len(chance), i)) for i in range(chance.shape[1])
        ]
        return jnp.stack(columns, 1) if columns else jnp.zeros(chance.shape, bool)

    def _toss(self, chance: np.ndarray, node: np.ndarray) -> jax.Array:
        # A coin with chance 0 or 1 needs no noise.
        rows = np.flatnonzero((chance > 0) & (chance < 1))
        if self.tossed[rows, node[rows]].any():
            raise NoiseReused("the coin of a node was tossed twice")
        self.tossed[rows, node[rows]] = True
        return self.script._one(np.stack([1 - chance, chance], -1)).astype(bool)
