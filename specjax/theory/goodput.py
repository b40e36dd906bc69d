"""The draft length under load: SmartSpec, later TurboSpec, Liu et al. 2024 (2406.14066).

Goodput is the number of tokens that a batch emits per second: accepted and bonus tokens of all rows
over the time of a round. The acceptance rate alone cannot choose a length: under load every
verified token costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specjax import checks
from specjax.errors import UserError
from specjax.theory import chain


def tokens(alphas: npt.ArrayLike, k: int) -> np.ndarray:
    """f64[B] tokens that a round with ``k`` draft tokens emits in each row, with the target's own.

    ``alphas`` [B] has one acceptance rate per row, or [B,D] conditional acceptance by depth (then
    k <= D). One number is one row. Raises UserError also for more draft tokens than depths.
    """
    rates, k = checks.rate("alphas", alphas), checks.count("k", k, 0)
    if rates.ndim and not len(rates):
        raise UserError("alphas is empty; give the rates of at least one row")
    if rates.ndim < 2:
        return np.atleast_1d(chain.expected_tokens(np.atleast_1d(rates), k))
    if rates.ndim > 2 or k > rates.shape[1]:
        wrong = f"alphas has shape {rates.shape} and k is {k}"
        right = "give one rate per row, or a table [rows, depths] of at least k depths"
        raise UserError(f"{wrong}; {right}")
    return 1 + np.cumprod(rates[:, :k], axis=1).sum(1)


def goodput(alphas: npt.ArrayLike, k: int, time: float) -> float:
    """Tokens per unit of time of a batch that drafts ``k`` tokens in rounds of length ``time``.

    ``alphas`` as in ``tokens``.
    """
    return float(tokens(alphas, k).sum()) / checks.cost("time", time, positive=True)


def best_length(
    alphas: npt.ArrayLike, time: Callable[[int], float], limit: int
) -> tuple[int, float]:
    """(k, goodput) for the draft length in 0..limit with the highest goodput. 0: do not speculate.

    Among equals the shortest. ``time(k)`` is the time of a whole round: drafting k tokens and
    verifying k + 1 in every row. A table of acceptance by depth limits k to its depths.
    """
    limit = checks.count("limit", limit, 0)
    if not callable(time):
        raise UserError(f"time is {time!r:.60}; it must be a function of the draft length")
    alphas = checks.rate("alphas", alphas)
    if alphas.ndim == 2:
        limit = min(limit, alphas.shape[1])
    without = goodput(alphas, 0, time(0))
    return chain.first_best(lambda k: goodput(alphas, k, time(k)), limit, without)


class Latency(NamedTuple):
    """A linear model of the time of a pass: a N_context + b N_batched + d."""

    context: float  # a, per cached token, over all rows
    batched: float  # b, per token in the pass, over all rows
    fixed: float  # d

    def __call__(self, context_tokens: float, batched_tokens: float) -> float:
        """The time of a pass."""
        context = checks.cost("context_tokens", context_tokens)
        batched = checks.cost("batched_tokens", batched_tokens)
        return self.context * context + self.batched * batched + self.fixed


def fit(profiles: Iterable[tuple[float, float, float]]) -> Latency:
    """The least-squares ``Latency`` of rows (context tokens, batched tokens, time of the pass).

    Raises UserError unless both sizes vary independently: otherwise the coefficients are
    undetermined.
    """
    try:
        table = checks.numbers("profiles", list(profiles))
    except TypeError:
        raise UserError(
            f"profiles is {profiles!r:.60}; give rows of (context tokens, batched tokens, time)"
        ) from None
    if table.ndim != 2 or table.shape[1] != 3:
        raise UserError(
            f"profiles has shape {table.shape}; "
            "its rows must be (context tokens, batched tokens, time)"
        )
    if (table < 0).any():
        raise UserError("profiles holds a negative number; sizes and times are at least 0")
    sizes = np.column_stack([table[:, :2], np.ones(len(table))])
    # Contexts have thousands of tokens: without scaling they dominate the other columns.
    scale = np.maximum(np.abs(sizes).max(0), 1e-300)
    if np.linalg.matrix_rank(sizes / scale) < 3:
        raise UserError(
            "profiles do not determine the coefficients; "
            "vary context and batched tokens independently"
        )
    coefficients = np.linalg.lstsq(sizes / scale, table[:, 2], rcond=None)[0] / scale
    return Latency(*coefficients.tolist())
