"""Argument checks. Each error names the argument, its value and what is right, in one line."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specjax.errors import UserError

LARGEST_COUNT = 2**53  # beyond it float64 does not represent every whole number
LARGEST = 2**63 - 1  # what arrays and files can hold


def whole(name: str, value: Any, least: int | None, most: int = LARGEST) -> int:
    """``value`` (a Python or NumPy integer) as an int.

    Raises:
        UserError: it is not a whole number >= ``least``, or it is larger than ``most``.
    """
    try:
        result = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        result = None
    bound = "" if least is None else f" >= {least}"
    if result is None or (least is not None and result < least):
        raise UserError(f"{name} is {_brief(value)}; it must be a whole number{bound}")
    if abs(result) > most:
        raise UserError(
            f"{name} is {_brief(value)}; it must be a whole number{bound}, at most {most}"
        )
    return result


def _brief(value: Any) -> str:
    """A value in a message; Python does not spell numbers of more than 4,300 digits."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of about {round(value.bit_length() * math.log10(2))} digits"
    return repr(value)


def counts(**values: int) -> None:
    """Raises UserError unless every value is a whole number >= 1."""
    for name, value in values.items():
        whole(name, value, 1)


def ngrams(longest: int, shortest: int) -> None:
    """Raises UserError unless both lengths are whole numbers >= 1 and longest >= shortest."""
    counts(max_ngram=longest, min_ngram=shortest)
    if longest < shortest:
        raise UserError(
            f"max_ngram is {longest} and min_ngram {shortest}; max_ngram must be at least min_ngram"
        )


def number(name: str, value: Any, right: str, ok: Callable[[float], bool]) -> None:
    """Raises UserError unless ``value`` is a finite number with ``ok(value)``.

    ``right`` describes such numbers in the message: "it must be a number {right}".
    """
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if good:
        good = bool(abs(value) <= sys.float_info.max) and ok(value)  # pyright: ignore[reportArgumentType]
    if not good:
        raise UserError(f"{name} is {_brief(value)}; it must be a number {right}")


def shown(value: Any) -> str:
    """What a value is, for messages: dtype and shape of an array, the type of anything else."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return f"of type {type(value).__name__}"


def yes_or_no(name: str, value: Any) -> None:
    """Raises UserError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}; it must be True or False")


def one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raises UserError unless ``value`` is one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise UserError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


# Arrays and real numbers, for closed forms.


def numbers(name: str, value: npt.ArrayLike) -> np.ndarray:
    """``value`` as float64, any shape. Raises UserError unless every entry is a finite number."""
    try:
        if np.asarray(value).dtype.kind in "USmMc":  # NumPy would read the text "3" as 3
            raise TypeError
        array = np.asarray(value, np.float64)
    except OverflowError:
        raise UserError(
            f"{name} is larger than a float can be; it must be a finite number"
        ) from None
    except (TypeError, ValueError):
        raise UserError(f"{name} is {value!r:.60}; it must be a number") from None
    if (wrong := ~np.isfinite(array)).any():
        raise UserError(f"{name} is {_first(array, wrong)}; it must be a finite number")
    return array


def rate(name: str, value: npt.ArrayLike) -> np.ndarray:
    """A probability or an array of them, as float64. Raises UserError."""
    array = numbers(name, value)
    if (wrong := (array < 0) | (array > 1)).any():
        raise UserError(f"{name} is {_first(array, wrong)}; it must be between 0 and 1")
    return array


def one_rate(name: str, value: npt.ArrayLike) -> float:
    """One probability, as a float. Raises UserError."""
    return _scalar(name, rate(name, value))


def count(name: str, value: Any, least: int = 0) -> int:
    """A whole number >= ``least`` that float64 represents exactly. Raises UserError."""
    return whole(name, value, least, LARGEST_COUNT)


def cost(name: str, value: npt.ArrayLike, *, positive: bool = False) -> float:
    """One time, size or count, as a float; 0 is allowed unless ``positive``. Raises UserError."""
    result = _scalar(name, numbers(name, value))
    if result < 0 or (positive and result == 0):
        right = "positive" if positive else "at least 0"
        raise UserError(f"{name} is {result:g}; it must be {right}")
    return result


def probabilities(name: str, value: npt.ArrayLike) -> np.ndarray:
    """Distributions f64[...,V].

    Raises:
        UserError: an entry outside [0, 1], or a sum that is not 1 (within 1e-2, for float16).
    """
    array = rate(name, value)
    if not array.ndim or not array.shape[-1]:
        raise UserError(f"{name} has shape {array.shape}; its last axis must be the vocabulary")
    sums = array.sum(-1)
    if (wrong := np.abs(sums - 1) > 1e-2).any():
        raise UserError(
            f"{name} sums to {_first(sums, wrong)} over the vocabulary; "
            "give probabilities, not logits"
        )
    return array


def per_row(
    name: str, value: Any, batch: int, right: str, ok: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """f64[B] from one number, or one for each of the rows.

    Raises UserError for another shape, or values that are not ``ok``; ``right`` names these.
    """
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name} is {_brief(value)}; it must be {right}") from None
    if array.shape not in ((), (batch,)):
        raise UserError(
            f"{name} has shape {array.shape}; give one number, or one for each of the {batch} rows"
        )
    rows = np.broadcast_to(array, (batch,))
    if (bad := ~ok(rows)).any():
        raise UserError(f"{name} is {rows[bad][0]:g}; it must be {right}")
    return rows


def _scalar(name: str, array: np.ndarray) -> float:
    if array.ndim:
        raise UserError(f"{name} has shape {array.shape}; it must be one number")
    return float(array)


def _first(array: np.ndarray, wrong: np.ndarray) -> str:
    return f"{array[wrong][0]:g}"
