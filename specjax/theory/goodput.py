"""How many tokens to draft under load: SmartSpec, later TurboSpec, Liu et al. 2024 (2406.14066).

Goodput is what a batch emits per second: accepted and bonus tokens of all rows over the time of a round. Acceptance alone
cannot choose a length, for it does not see that a busy machine pays for every verified token.
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
    """f64[B] tokens that a round with ``k`` draft tokens emits in each row, the target's own included.

    ``alphas`` [B] is one acceptance rate a row, or [B,D] conditional acceptance by depth (then k <= D). A single row may
    come without B as a number. UserError also for more draft tokens than depths.
    """
    rates, k = checks.rate("alphas", alphas), checks.count("k", k, 0)
    if rates.ndim and not len(rates):
        raise UserError("alphas is empty; give the rates of at least one row")
    if rates.ndim < 2:
        return np.atleast_1d(chain.expected_tokens(np.atleast_1d(rates), k))
    if rates.ndim > 2 or k > rates.shape[1]:
        told = f"alphas has shape {rates.shape} and k is {k}"
        raise UserError(
            f"{told}; give one rate a row, or a table [rows, depths] of at least k depths"
        )
    return 1 + np.cumprod(rates[:, :k], axis=1).sum(1)


def goodput(alphas: npt.ArrayLike, k: int, time: float) -> float:
    """Tokens per unit of time of a batch that drafts ``k`` tokens, if such a round takes ``time``. Arguments of ``tokens``."""
    return float(tokens(alphas, k).sum()) / checks.cost("time", time, positive=True)


def best_length(
    alphas: npt.ArrayLike, time: Callable[[int], float], limit: int
) -> tuple[int, float]:
    """(k, goodput): the draft length in 0..limit with the highest goodput; among equals the shortest. 0: do not speculate.

    ``time(k)`` is that of a whole round: drafting k tokens and verifying k + 1 in every row. A table of acceptance by depth
    bounds k too.
    """
    limit = checks.count("limit", limit, 0)
    if not callable(time):
        raise UserError(f"time is {time!r:.60}; it must be a function of the draft length")
    alphas = checks.rate("alphas", alphas)
    if alphas.ndim == 2:
        limit = min(limit, alphas.shape[1])
    best = 0, goodput(alphas, 0, time(0))
    for k in range(1, limit + 1):
        value = goodput(alphas, k, time(k))
        if value > best[1] * (1 + 1e-12):  # not by rounding alone
            best = k, value
    return best


class Latency(NamedTuple):
    """The time of a model's pass, linear in what it reads and what it computes: a N_context + b N_batched + d."""

    context: float  # a, per token in the caches of all rows
    batched: float  # b, per token in the pass, of all rows
    fixed: float  # d

    def __call__(self, context_tokens: float, batched_tokens: float) -> float:
        """The time of a pass."""
        context = checks.cost("context_tokens", context_tokens)
        return (
            self.context * context
            + self.batched * checks.cost("batched_tokens", batched_tokens)
            + self.fixed
        )


def fit(profiles: Iterable[tuple[float, float, float]]) -> Latency:
    """The least-squares ``Latency`` of measurements (context tokens, batched tokens, time of the pass).

    UserError unless both sizes vary independently in them, for otherwise the coefficients are undetermined.
    """
    try:
        table = checks.numbers("profiles", list(profiles))
    except TypeError:
        raise UserError(
            f"profiles is {profiles!r:.60}; give rows of (context tokens, batched tokens, time)"
        ) from None
    if table.ndim != 2 or table.shape[1] != 3:
        raise UserError("profiles must be rows of (context tokens, batched tokens, time)")
    if (table < 0).any():
        raise UserError("profiles holds a negative number; sizes and times are at least 0")
    sizes = np.column_stack([table[:, :2], np.ones(len(table))])
    scale = np.maximum(
        np.abs(sizes).max(0), 1e-300
    )  # contexts are thousands: else they drown the rest
    if np.linalg.matrix_rank(sizes / scale) < 3:
        raise UserError(
            "profiles do not tell the coefficients apart; vary context and batched tokens independently"
        )
    found = np.linalg.lstsq(sizes / scale, table[:, 2], rcond=None)[0] / scale
    return Latency(*found.tolist())
