"""Acceptance of siblings by rank, as the search for a tree needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specjax.checks import whole
from specjax.errors import UserError

if TYPE_CHECKING:
    from specjax.types import StepInfo


def acceptance_table(acceptance: npt.ArrayLike) -> np.ndarray:
    """Acceptance as f64[levels, branching]. Raises UserError for other than probabilities."""
    try:
        table = np.asarray(acceptance, np.float64)
    except (ValueError, TypeError):
        raise UserError(
            "acceptance is not a table of numbers; give P[branch] or P[depth, branch]"
        ) from None
    table = table[None] if table.ndim == 1 else table
    if table.ndim != 2 or not table.size:
        right = "give P[branch] or P[depth, branch], not empty"
        raise UserError(f"acceptance has shape {np.shape(acceptance)}; {right}")
    if not (np.isfinite(table).all() and (table >= 0).all() and (table.sum(1) <= 1 + 1e-6).all()):
        right = "its entries must be >= 0 and sum to at most 1 at each depth"
        raise UserError(f"acceptance does not hold probabilities; {right}")
    return table


def acceptance_vector(ranks: npt.ArrayLike, width: int) -> np.ndarray:
    """P f64[width]: how often each rank was the accepted one, from observed ranks (-1: none).

    Unconditional, as ``optimal`` needs it: rejections count in the denominator. Observe sets of
    ``width`` siblings with an accepted parent. Raises UserError for no observation, or one outside
    -1..width-1.
    """
    seen, width = np.asarray(ranks), whole("width", width, 1)
    if not seen.size:
        raise UserError("there is no observation of an accepted rank; give at least one")
    if not np.issubdtype(seen.dtype, np.integer) or seen.min() < -1 or seen.max() >= width:
        raise UserError(f"ranks must be whole numbers from -1 (none) to {width - 1} (width - 1)")
    return np.bincount(seen.ravel() + 1, minlength=width + 1)[1:] / seen.size


def accepted_ranks(info: StepInfo) -> np.ndarray:
    """i64[R]: the accepted child of the pending token, -1 for none, in rows that were not finished.

    For ``acceptance_vector``. ``info`` comes from ``decode.stream``, with a draft of one level. Of
    equal siblings the first counts: ``recursive`` never accepts another, because a rejected token
    has no mass left. Raises UserError for more levels.
    """
    if info.draft.longest != 1:
        levels = info.draft.longest
        raise UserError(f"the draft has {levels} levels; count ranks on trees of one level")
    emitted = np.asarray(info.draft.tokens) == np.asarray(info.tokens)[:, :1]
    emitted &= np.asarray(info.draft.valid)
    ranks = np.where(np.asarray(info.accepted) > 0, emitted.argmax(1), -1)
    return ranks[np.asarray(info.emitted) > 0]
