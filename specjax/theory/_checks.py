"""Arguments of the closed forms, checked alike everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specjax.errors import UserError
from specjax.topology import whole

LARGEST = 2**53  # beyond it f64 has no longer every whole number


def numbers(name: str, value: npt.ArrayLike) -> np.ndarray:
    """``value`` as f64, of any shape; UserError unless every entry is a finite number."""
    try:
        if np.asarray(value).dtype.kind in "USmMc":  # NumPy would read the text "3" as 3
            raise TypeError
        array = np.asarray(value, np.float64)
    except OverflowError:
        raise UserError(f"{name} is larger than a float can be; it must be a finite number") from None
    except (TypeError, ValueError):
        raise UserError(f"{name} is {value!r:.60}; it must be a number") from None
    if not np.isfinite(array).all():
        raise UserError(f"{name} is {_shown(array, ~np.isfinite(array))}; it must be a finite number")
    return array


def rate(name: str, value: npt.ArrayLike) -> np.ndarray:
    """A probability or an array of them, as f64."""
    array = numbers(name, value)
    if (wrong := (array < 0) | (array > 1)).any():
        raise UserError(f"{name} is {_shown(array, wrong)}; it must lie between 0 and 1")
    return array


def one_rate(name: str, value: npt.ArrayLike) -> float:
    """One probability, as a float."""
    return _one(name, rate(name, value))


def count(name: str, value: Any, least: int = 0) -> int:
    """A whole number that a float can hold."""
    number = whole(name, value, least)
    if number > LARGEST:
        raise UserError(f"{name} is above 2^53; it must be a whole number >= {least} of sensible size")
    return number


def cost(name: str, value: npt.ArrayLike, *, positive: bool = False) -> float:
    """One time, size or count, as a float; 0 only if it need not be positive."""
    number = _one(name, numbers(name, value))
    if number < 0 or (positive and number == 0):
        raise UserError(f"{name} is {number:g}; it must be {'positive' if positive else 'at least 0'}")
    return number


def laws(name: str, value: npt.ArrayLike) -> np.ndarray:
    """Probability laws f64[...,V]; UserError unless they are non-negative and sum to 1 (to float16's accuracy)."""
    array = rate(name, value)
    if not array.ndim or not array.shape[-1]:
        raise UserError(f"{name} has shape {array.shape}; its last axis must be the vocabulary")
    sums = array.sum(-1)
    if (wrong := np.abs(sums - 1) > 1e-2).any():
        raise UserError(f"{name} sums to {_shown(sums, wrong)} over the vocabulary; give probabilities, not logits")
    return array


def _one(name: str, array: np.ndarray) -> float:
    if array.ndim:
        raise UserError(f"{name} has shape {array.shape}; it must be one number")
    return float(array)


def _shown(array: np.ndarray, wrong: np.ndarray) -> str:
    return f"{array[wrong][0]:g}"
