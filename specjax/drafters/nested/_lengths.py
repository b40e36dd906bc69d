"""The matrix K of a cascade: how many tokens of which model are in a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specjax.checks import whole
from specjax.errors import UserError

# The defaults: tokens for the target, for each model, and of the lookup.
FIRST, FURTHER, LOOKUP = 5, 3, 10


class Lengths(NamedTuple):
    """Row r has the tokens of model r, r + 1, ... and of the lookup in a draft for model r - 1.

    Row 0 is the draft for the target.
    """

    rows: tuple[tuple[int, ...], ...]


def parse(given: str | Sequence[Sequence[int]] | None, models: int) -> Lengths:
    """The lengths for so many models.

    Raises:
        UserError: another form, numbers below 0, an empty draft for the target, or a model that no
            draft uses.
    """
    if given is None:
        return _default(models)
    rows = _read(given)
    if len(rows) != models + 1:
        raise UserError(
            f"lengths has {len(rows)} rows; with {models} models it needs {models + 1}, one for "
            "the target and one for each model"
        )
    rows = [_upper(row, number, models + 1) for number, row in enumerate(rows)]
    if not any(rows[0]):
        raise UserError("lengths has no tokens in its first row; the target needs a draft")
    used = {0}
    for number, row in enumerate(rows):
        if number in used:
            used |= {number + 1 + index for index, size in enumerate(row[:-1]) if size}
    missing = sorted(set(range(models + 1)) - used)
    if missing:
        raise UserError(
            f"lengths uses no token of model {missing[0]} (of {models}); leave the model out, or "
            "give it tokens"
        )
    return Lengths(tuple(rows))


def _default(models: int) -> Lengths:
    rows = [(FIRST if row == 0 else FURTHER, *[0] * (models - row)) for row in range(models)]
    return Lengths((*rows, (LOOKUP,)))


def _read(given: str | Sequence[Sequence[int]]) -> list[list[int]]:
    """The rows of a text "5,14,10;1,10;10", or of lists."""
    wrong = f"lengths is {given!r}; give rows of whole numbers, as in '5,14,10;1,10;10'"
    try:
        if isinstance(given, str):
            return [[int(size) for size in row.split(",")] for row in given.split(";")]
        rows = [list(row) for row in given]
    except (TypeError, ValueError):
        raise UserError(wrong) from None
    if not all(isinstance(size, int) for row in rows for size in row):
        raise UserError(wrong)
    return rows


def _upper(row: list[int], number: int, size: int) -> tuple[int, ...]:
    """Row ``number`` without the zeros of the published form at its begin."""
    for length in row:
        whole("a length of the cascade", length, 0)
    if len(row) == size and not any(row[:number]):
        row = row[number:]
    if len(row) != size - number:
        raise UserError(
            f"row {number + 1} of lengths has {len(row)} numbers; it needs {size - number}: one "
            "for each smaller model, and one for the lookup"
        )
    return tuple(row)
