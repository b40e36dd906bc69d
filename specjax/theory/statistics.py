"""Tests of observed counts against a distribution."""

from __future__ import annotations

import jax
import numpy as np


def chi_square(counts: np.ndarray, probs: np.ndarray) -> tuple[float, int, float]:
    """Pearson's test of observed counts: (statistic, degrees of freedom, p-value).

    Cells with an expected count below 5 are pooled. An observation where the probability is
    0 gives p = 0.
    """
    counts, probs = (np.asarray(x, np.float64).ravel() for x in (counts, probs))
    if counts[probs <= 0].sum() > 0:
        return float("inf"), 1, 0.0
    expected = probs / probs.sum() * counts.sum()
    small = expected < 5
    pooled_counts = np.append(counts[~small], counts[small].sum())
    pooled = np.append(expected[~small], expected[small].sum())
    keep = pooled > 0
    statistic = float((((pooled_counts - pooled) ** 2)[keep] / pooled[keep]).sum())
    freedom = int(keep.sum()) - 1
    return statistic, freedom, chi_square_tail(statistic, freedom)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with ``freedom`` degrees of freedom > ``statistic``)."""
    if freedom < 1:
        return 1.0
    return float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2))


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Half the sum of absolute differences."""
    return float(0.5 * np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).sum())
