"""Running estimates of acceptance by depth, from rounds in which deep tokens are seldom tested.

The token at depth j is tested only if all before it were accepted. So what is counted is
conditional: of the rounds in which the first j - 1 tokens were accepted and a j-th was drafted, the
share in which it was accepted too. A round that ends earlier says nothing about depth j. (The share
of rounds with j accepted tokens would mix in how often j tokens were drafted.)
"""

from __future__ import annotations

import numpy as np

from specjax import checks


class AcceptanceEstimate:
    """The conditional acceptance at depths 1..``limit``, over all rows.

    Counts fade: an observation counts 1/e as much after ``memory`` further ones of the same depth.
    The estimate of a depth begins with that of the depth before it, which counts as ``prior``
    observations, and the first depth with ``start``: without observations acceptance is the same at
    all depths.
    """

    def __init__(
        self, limit: int, *, memory: float = 2000.0, start: float = 0.7, prior: float = 8.0
    ):
        self._limit = checks.count("limit", limit)
        self._memory = checks.cost("memory", memory, positive=True)
        self._start, self._prior = checks.one_rate("start", start), checks.cost("prior", prior)
        self._tested, self._accepted = np.zeros(limit), np.zeros(limit)

    def observe(self, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """Counts a round: accepted and drafted tokens of each row."""
        tested, right = counts_by_depth(accepted, drafted, self._limit)
        fade = np.exp(-tested / self._memory)
        self._tested = self._tested * fade + tested
        self._accepted = self._accepted * fade + right

    def rates(self) -> np.ndarray:
        """f64[limit]: the conditional acceptance at each depth."""
        rates, above = np.zeros(self._limit), self._start
        for depth in range(self._limit):
            right = self._accepted[depth] + self._prior * above
            above = rates[depth] = right / (self._tested[depth] + self._prior)
        return rates

    def cumulative(self) -> np.ndarray:
        """f64[limit + 1]: the expected accepted tokens of drafts of 0..limit tokens."""
        return np.concatenate([[0.0], np.cumsum(np.cumprod(self.rates()))])


class RowEstimates:
    """The acceptance of each row of a batch, the same at all depths, from few observations.

    A row's rate is accepted over tested tokens, mixed with the mean rate of earlier requests, which
    counts as ``prior`` observations. This mean counts every request once. The rates of all tokens
    by depth (``AcceptanceEstimate``) would not do: where lengths follow acceptance, deep tokens are
    tested in good rows only, so every new row would begin with the rates of good rows. Counts fade
    by ``fade`` with every round in which the row drafts, and the mean with every ``memory``
    requests to 1/e.
    """

    def __init__(
        self, *, start: float = 0.7, prior: float = 6.0, fade: float = 0.97, memory: float = 200.0
    ):
        self._mean = checks.one_rate("start", start)
        self._prior = checks.cost("prior", prior, positive=True)
        self._fade = checks.one_rate("fade", fade)
        self._memory = checks.cost("memory", memory, positive=True)
        self._requests = np.zeros(0, np.int64)
        self._counts = np.zeros((0, 2))  # tested, accepted
        self._seen = 0.0  # requests in the mean

    def rates(self, requests: np.ndarray) -> np.ndarray:
        """f64[B] of the rows of these requests. Requests that left the batch are forgotten."""
        counts = by_request(requests, self._requests, self._counts)
        left = ~np.isin(self._requests, requests, assume_unique=True)
        for tested, right in self._counts[left].tolist():
            self._seen = min(self._seen + 1, self._memory)
            rate = (right + self._mean) / (tested + 1)
            self._mean += (rate - self._mean) / (self._seen + 1)
        self._requests, self._counts = requests, counts
        return (counts[:, 1] + self._prior * self._mean) / (counts[:, 0] + self._prior)

    def observe(self, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """Counts a round of the rows of the last call of ``rates``."""
        tested = np.minimum(accepted + 1, drafted)
        self._counts *= np.where(drafted > 0, self._fade, 1.0)[:, None]
        self._counts += np.stack([tested, accepted], -1)


def by_request(requests: np.ndarray, earlier: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[B,...]: the values [A,...] of ``earlier`` requests, for ``requests``; 0 for new ones."""
    result = np.zeros((len(requests), *values.shape[1:]), values.dtype)
    _, new, old = np.intersect1d(requests, earlier, assume_unique=True, return_indices=True)
    result[new] = values[old]
    return result


def counts_by_depth(
    accepted: np.ndarray, drafted: np.ndarray, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """f64[limit] each: rows in which a token at depth 1, 2, ... was tested, and was accepted."""

    def reached(depths: np.ndarray) -> np.ndarray:
        rows = np.bincount(depths, minlength=limit + 1)
        return rows[::-1].cumsum()[::-1].astype(float)[1 : limit + 1]

    return reached(np.minimum(accepted + 1, drafted)), reached(accepted)
