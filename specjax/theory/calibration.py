"""Calibration of a drafter's confidences: sequential temperature scaling (DSpark, 2607.05147).

The confidence at depth j is the chance that the token there is accepted if those before it were.
The product of the first j is the chance that all of them are accepted. Confidences that are each a
little too high make a product that is much too high, so the temperatures are fitted one depth after
the other, each so that the *product* up to its depth is calibrated.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specjax.checks import numbers
from specjax.errors import UserError

# The temperatures that are tried, evenly in the logarithm, and the bins of the calibration error.
GRID = np.exp(np.linspace(np.log(0.2), np.log(20.0), 121))
BINS = 10
EDGE = 1e-6  # confidences are kept so far from 0 and 1


def scaled(confidences: npt.ArrayLike, heats: npt.ArrayLike) -> np.ndarray:
    """f64[...,K]: confidences f[...,K] with the logit of each depth divided by its temperature."""
    sure = np.clip(np.asarray(confidences, float), EDGE, 1 - EDGE)
    return 1 / (1 + np.exp(-np.log(sure / (1 - sure)) / np.asarray(heats, float)))


def error(predicted: npt.ArrayLike, happened: npt.ArrayLike) -> float:
    """The expected calibration error of probabilities f[n] of events bool[n], in [0, 1].

    The mean distance between probability and frequency over bins of about equally many events;
    equal probabilities share a bin.
    """
    predicted, happened = np.asarray(predicted, float), np.asarray(happened, float)
    if not (size := len(predicted)):
        return 0.0
    below = np.searchsorted(np.sort(predicted), predicted)
    bins = below * min(BINS, size) // size
    gaps = np.bincount(bins, predicted) - np.bincount(bins, happened)
    return float(np.abs(gaps).sum() / size)


def fit(confidences: npt.ArrayLike, accepted: npt.ArrayLike) -> np.ndarray:
    """f64[K]: the temperature of each depth; 1 for a depth that no draft reached.

    Args:
        confidences: f[n,K] of n rounds; negative where a draft had no token.
        accepted: i[n] levels accepted in each round.

    Raises:
        UserError: shapes that do not fit, or a confidence above 1.
    """
    sure, levels = numbers("confidences", confidences), numbers("accepted", accepted)
    if sure.ndim != 2 or levels.shape != sure.shape[:1]:
        raise UserError(
            f"confidences have shape {sure.shape} and accepted {levels.shape}; give [rounds, "
            "depths] and [rounds]"
        )
    if (sure > 1).any():
        raise UserError("a confidence is above 1; give probabilities, and -1 for no token")
    heats, product = np.ones(sure.shape[1]), np.ones(len(sure))
    reached = np.ones(len(sure), bool)
    for depth in range(sure.shape[1]):
        reached &= sure[:, depth] >= 0
        if not reached.any():
            break
        own, happened = sure[reached, depth], levels[reached] > depth
        errors = [error(product[reached] * scaled(own, heat), happened) for heat in GRID]
        # Of equally good ones the nearest to 1, which changes nothing.
        best = np.flatnonzero(np.isclose(errors, min(errors), rtol=0, atol=1e-12))
        heats[depth] = GRID[best[np.argmin(np.abs(np.log(GRID[best])))]]
        product[reached] *= scaled(own, heats[depth])
    return heats
