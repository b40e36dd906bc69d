"""Policies of a server: how many tokens each row of the running batch drafts in the next round.

A policy is an object with two methods: ``length(batch)`` before a round, and ``observe(accepted,
drafted)`` after it. Both arrays have the rows of the last batch in their order. A length may depend
on the batch and on earlier rounds, never on the tokens that are drafted: it leaves the output law
unchanged with every lossless rule.

``FixedLength`` and ``LengthLadder`` ignore acceptance. ``FollowAcceptance`` ignores the load.
``GoodputLength`` is SmartSpec, later TurboSpec, Liu et al. 2024 (2406.14066): the length with the
most expected tokens per second. ``GoodputRows`` gives every row its own length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from specjax import checks
from specjax.errors import UserError
from specjax.theory.acceptance import AcceptanceEstimate, RowEstimates
from specjax.theory.round_costs import RoundCosts, work_of, work_of_depths


class RunningBatch(NamedTuple):
    """What a policy sees before a round: B >= 1 rows."""

    requests: np.ndarray  # i64[B] the request of each row; a request keeps its number
    context: np.ndarray  # i64[B] cached tokens
    available: np.ndarray  # i64[B] the most tokens that the drafter can propose now
    prompt: int = 0  # tokens of the prompts of new rows, which this round also reads
    waiting: int = 0  # requests that wait for a row


class Policy(Protocol):
    """What the simulation asks."""

    def length(self, batch: RunningBatch) -> int | np.ndarray:
        """The most draft tokens of all rows, or of each row [B]; 0: no speculation."""
        ...

    def observe(self, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """The outcome of the round for the rows of the last batch, i64[B] each."""
        ...


class LengthLadder:
    """A length for each batch size: of the largest entry that the batch reaches; below, 0.

    ``{1: 5, 16: 2, 64: 0}`` drafts 5 tokens in batches of 1 to 15 rows. vLLM's
    ``num_speculative_tokens_per_batch_size``.
    """

    def __init__(self, lengths: Mapping[int, int]):
        if not lengths:
            raise UserError("lengths is empty; give a draft length for at least one batch size")
        for rows, length in lengths.items():
            checks.count("a batch size", rows, 1)
            checks.count("a length", length)
        self._lengths = dict(sorted(lengths.items()))

    def length(self, batch: RunningBatch) -> int:
        """The length of the batch size."""
        reached = [n for rows, n in self._lengths.items() if rows <= len(batch.requests)]
        return reached[-1] if reached else 0

    def observe(self, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """Learns nothing."""


class FixedLength(LengthLadder):
    """Always the same length, 0: plain decoding."""

    def __init__(self, length: int):
        super().__init__({1: checks.count("length", length)})


class FollowAcceptance:
    """Each row's length from its last round: two more if all was accepted, else one less.

    The schedule "heuristic" of transformers' assisted generation, between 1 and ``limit``. It
    cannot see the load.
    """

    def __init__(self, limit: int, start: int = 5):
        self._limit = checks.count("limit", limit, 1)
        self._start = min(checks.count("start", start, 1), self._limit)
        self._lengths: dict[int, int] = {}
        self._rows: list[int] = []

    def length(self, batch: RunningBatch) -> np.ndarray:
        """The length of each row."""
        self._rows = batch.requests.tolist()
        # Rows that left the batch are forgotten.
        self._lengths = {row: self._lengths.get(row, self._start) for row in self._rows}
        return np.array(list(self._lengths.values()))

    def observe(self, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """Moves the lengths of the rows that drafted."""
        for row, right, all_of in zip(self._rows, accepted.tolist(), drafted.tolist(), strict=True):
            if all_of:
                moved = self._lengths[row] + (2 if right == all_of else -1)
                self._lengths[row] = min(max(moved, 1), self._limit)


class GoodputLength:
    """One length for all rows: that with the most expected tokens per second.

    Expected tokens follow from running estimates of the acceptance by depth
    (``acceptance.AcceptanceEstimate``), the time from the cost model. Prompts of new rows cost time
    in this round whatever is drafted. So a round is compared by its tokens minus its time times the
    highest rate of a round without prompts, which is the same choice if there are no prompts.

    **Exploration.** What is not drafted is not observed: with length 0 nothing would be learnt any
    more. A share ``explore`` of the time may be spent on drafts that are expected to cost more than
    they bring: when enough of it is saved, rows draft one token more than the best length, all rows
    or, if that costs less, a single one in turn.
    """

    def __init__(
        self, costs: RoundCosts, limit: int, *, explore: float = 0.005, memory: float = 2000.0
    ):
        self._costs, self._limit = costs, checks.count("limit", limit)
        self._explore = checks.one_rate("explore", explore)
        self._estimate = AcceptanceEstimate(self._limit, memory=memory)
        self._saved = 0.0  # seconds that may be spent on exploration
        self._turn = 0

    def length(self, batch: RunningBatch) -> np.ndarray:
        """The best length of each row, as far as it can draft so much; sometimes one more."""
        limits = np.minimum(batch.available, self._limit)
        cumulative = self._estimate.cumulative()
        # Rows that can draft j tokens, for all j that some row can draft.
        able = np.bincount(limits)[::-1].cumsum()[::-1][1:]
        gains = np.cumsum(able * np.diff(cumulative[: len(able) + 1]))
        plans = [able[:length].tolist() for length in range(len(able) + 1)]
        best, rate = self._best(batch, plans, len(limits) + np.append(0.0, gains))
        value = np.broadcast_to(np.diff(cumulative), (len(limits), self._limit))
        return self._explored(batch, np.minimum(limits, best), limits, value, rate)

    def observe(self, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """Updates the estimates."""
        self._estimate.observe(accepted, drafted)

    def _best(
        self, batch: RunningBatch, plans: Sequence[Sequence[int]], tokens: np.ndarray
    ) -> tuple[int, float]:
        """The number of the best plan, and the highest rate of a round without prompts.

        A plan is the number of rows that draft a first, second, ... token; ``tokens`` f64[P] are
        the expected tokens of the rounds, or another measure of their worth.
        """
        rows, context = len(batch.requests), float(batch.context.sum())
        works = [work_of_depths(rows, plan, context) for plan in plans]
        times = np.array([self._costs(work) for work in works])
        best = int(np.argmax(rates := tokens / times))
        rate = float(rates[best])
        if batch.prompt:
            times = np.array([self._costs(work._replace(prompt=batch.prompt)) for work in works])
            best = int(np.argmax(tokens - rate * times))
        self._saved += self._explore * float(times[best])
        return best, rate

    def _explored(
        self,
        batch: RunningBatch,
        lengths: np.ndarray,
        limits: np.ndarray,
        value: np.ndarray,
        rate: float,
    ) -> np.ndarray:
        """The lengths, or one more in all rows that can draft more, or in one of them.

        ``value`` [B,K]: what the j-th draft token adds to the tokens of a plan.
        """
        able = np.flatnonzero(lengths < limits)
        if not len(able) or not self._saved:
            return lengths
        self._turn += 1
        base = self._time(batch, lengths)
        for rows in (able, able[self._turn % len(able), None]):
            longer = lengths.copy()
            longer[rows] += 1
            gained = float(value[rows, lengths[rows]].sum())
            loss = self._time(batch, longer) - base - gained / rate
            if loss <= self._saved:
                self._saved -= max(loss, 0.0)
                return longer
        return lengths

    def _time(self, batch: RunningBatch, lengths: np.ndarray) -> float:
        return self._costs(work_of(lengths, float(batch.context.sum()), batch.prompt))


class GoodputRows(GoodputLength):
    """A length for each row, by its own acceptance (``acceptance.RowEstimates``).

    The sum of the rows' tokens per second would favour rows with high acceptance: all wait for
    their long drafts, the other rows stay in the batch for longer, and fewer requests are finished.
    With E_r the expected tokens of row r, the time of a round T and B rows, a token of row r takes
    T / (B E_r) of the server's time. So a draft token is worth the relative growth of E_r, and
    lengths are chosen by the largest (product of all E_r)^(1/B) / T, which is the same as goodput
    if all rows are equal. As a length grows its next token is worth less. So the tokens with a
    worth above a threshold are drafted, with the best of several thresholds, or the same length in
    all rows if that is better (a draft step of a model costs much the same for one row as for all).
    DSpark (2607.05147, algorithm 1) admits draft tokens in this way, for the sum of the rows.
    """

    def __init__(self, costs: RoundCosts, limit: int, *, explore: float = 0.005):
        super().__init__(costs, limit, explore=explore)
        self._rows = RowEstimates()

    def length(self, batch: RunningBatch) -> np.ndarray:
        """The length of each row."""
        limits = np.minimum(batch.available, self._limit)
        depths = np.arange(1, self._limit + 1)
        # [B,K]: the probability that the first j tokens are all accepted.
        value = self._rows.rates(batch.requests)[:, None] ** depths
        expected = 1 + np.cumsum(value, axis=1)
        growth = np.log(expected) - np.log(expected - value)  # falls along j
        able = depths <= limits[:, None]
        worth = np.where(able, growth, 0.0)
        least = _thresholds(worth, 2 * self._limit)
        equal = able & (depths <= depths[:, None, None])
        drafted = np.concatenate([worth >= least[:, None, None], equal])  # [P,B,K]
        mean = np.exp(np.where(drafted, worth, 0.0).sum((1, 2)) / len(limits))
        plans = [[rows for rows in each if rows] for each in drafted.sum(1).tolist()]
        best, rate = self._best(batch, plans, mean)
        lengths = drafted[best].sum(1)
        return self._explored(batch, lengths, limits, growth * mean[best] / len(limits), rate)

    def observe(self, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """Updates the estimates of the rows."""
        self._rows.observe(accepted, drafted)


def _thresholds(worth: np.ndarray, most: int) -> np.ndarray:
    """f64[T]: inf, then at most ``most`` falling values of ``worth``, the last the smallest > 0."""
    every = np.sort(worth[worth > 0])[::-1]
    if not len(every):
        return np.array([math.inf])
    places = np.ceil(np.linspace(0, len(every), min(most, len(every)) + 1)).astype(int)[1:] - 1
    return np.concatenate([[math.inf], np.unique(every[places])[::-1]])
