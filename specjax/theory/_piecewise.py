"""Functions that are linear between known points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def last_positive(function: Callable[[float], float], kinks: Sequence[float]) -> float:
    """The supremum of the x > 0 with function(x) > 0: inf if there is no bound, 0 for no such x.

    ``function`` is linear between 0, the ``kinks`` (positive, some may be inf) and inf. Where it is
    0 up to rounding it must return 0.
    """
    points = sorted(x for x in kinks if 0 < x < math.inf) or [1.0]
    last = points[-1]
    # Beyond the last kink the slope decides.
    if function(1e9 * last) > 0:
        return math.inf
    if function(last) > 0:
        slope = (function(2 * last) - function(last)) / last
        return last - function(last) / slope
    points = [points[0] * 1e-6, *points]
    for low, high in zip(points[-2::-1], points[:0:-1], strict=True):
        if (value := function(low)) > 0:
            return low + (high - low) * value / (value - function(high))
    return 0.0
