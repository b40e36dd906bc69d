"""Chains of draft tokens: Leviathan et al. 2023 (2211.17192), sections 3.1 to 3.5, and the same with measured costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from specjax import checks
from specjax.errors import UserError

Number = TypeVar("Number", float, np.ndarray)

Verify = Callable[[int], float] | Mapping[int, float] | Sequence[float]
"""The time of a target pass over n tokens, in steps: a function of n, times by n (between them interpolated), or a list
whose entry i is for i + 1 tokens."""


# What a draft is worth.


def overlap(target: npt.ArrayLike, draft: npt.ArrayLike) -> np.ndarray:
    """beta = sum_x min(target(x), draft(x)): the probability that a token drawn from ``draft`` is accepted.

    Both [...,V] under the same sampling settings -> f64[...]. Section 3.2, Theorem 3.5.
    """
    return np.minimum(*_pair(target, draft)).sum(-1)


def divergence(target: npt.ArrayLike, draft: npt.ArrayLike) -> np.ndarray:
    """D_LK = sum_x |target(x) - M(x)| with M the mean of both: the probability that a drawn token is rejected.

    Both [...,V] -> f64[...], symmetric, 0 for equal laws and 1 for disjoint ones; it is the total variation distance, and
    1 - ``overlap`` (Lemma 3.3). Definition 3.2.
    """
    target, draft = _pair(target, draft)
    return np.abs(target - (target + draft) / 2).sum(-1)


def acceptance_rate(
    target_laws: npt.ArrayLike, draft_laws: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> float:
    """alpha = E[beta]: the mean overlap of two sets of laws [...,V] at the same positions, weighted by ``weights`` [...].

    Take every position of text that the target wrote: positions that a draft reached, or where one was rejected, are a
    biased choice. Corollary 3.6.
    """
    values = overlap(target_laws, draft_laws)
    if not values.size:
        raise UserError("there is no position in the laws; give at least one")
    if weights is None:
        return float(values.mean())
    shares = checks.numbers("weights", weights)
    if shares.shape != values.shape:
        raise UserError(f"weights has shape {shares.shape}; the laws need {values.shape}")
    if (shares < 0).any() or not shares.sum() > 0:
        raise UserError("weights must be at least 0, and not all 0")
    return float(np.average(values, weights=shares))


def _pair(target: npt.ArrayLike, draft: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    first, second = (
        checks.probabilities("the target's law", target),
        checks.probabilities("the draft's law", draft),
    )
    if first.shape != second.shape:
        raise UserError(
            f"the target's laws have shape {first.shape} and the draft's {second.shape}; give equal ones"
        )
    return first, second


# Tokens of a round.


def expected_tokens(alpha: Number, gamma: int) -> Number:
    """Tokens per round if every draft token is accepted with probability ``alpha`` independently: eq. 1.

    (1 - alpha^(gamma+1)) / (1 - alpha), between 1 and gamma + 1; for each entry of an array.
    """
    rate, gamma = checks.rate("alpha", alpha), checks.count("gamma", gamma, 0)
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # alpha of 0 and of 1 have their own values
        tokens = -np.expm1((gamma + 1) * np.log(rate)) / (1 - rate)
    return _like(alpha, np.where(rate == 1, gamma + 1.0, tokens))


def expected_tokens_by_depth(acceptance: Sequence[float]) -> float:
    """Tokens per round from measured conditional acceptance at each depth: 1 + sum of running products.

    Equation 1 without its assumption that all depths are alike.
    """
    rates = checks.rate("acceptance", acceptance)
    if rates.ndim != 1:
        raise UserError(f"acceptance has shape {rates.shape}; give a list, one rate a depth")
    return 1 + float(np.cumprod(rates).sum())


def oracle_tokens(alpha: Number) -> Number:
    """Tokens per round if gamma always ended just where the first rejection comes: 1 / (1 - alpha), inf for 1. Section 3.5."""
    rate = checks.rate("alpha", alpha)
    with np.errstate(divide="ignore"):
        return _like(alpha, 1 / (1 - rate))


# Time.


def walltime_improvement(
    alpha: Number, gamma: int, c: float, verify: Verify | None = None
) -> Number:
    """Speed-up over plain decoding: expected tokens / (gamma c + v(gamma + 1)).

    Without ``verify`` a pass over gamma + 1 tokens is taken to cost one step: Theorem 3.8. With it, the time measured for
    that many tokens is paid.
    """
    gamma = checks.count("gamma", gamma)
    round_time = gamma * checks.cost("c", c) + verify_cost(verify, gamma + 1)
    return expected_tokens(alpha, gamma) / round_time


def speedup(tokens_per_round: float, draft: float, verify: float, step: float = 1.0) -> float:
    """Speed-up over plain decoding when a round drafts for ``draft`` and verifies for ``verify``, and a step takes ``step``.

    Theorem 3.8 with measured times, in any one unit, instead of the assumption that verification costs one step.
    """
    tokens = checks.cost("tokens_per_round", tokens_per_round)
    round_time = checks.cost("draft", draft) + checks.cost("verify", verify, positive=True)
    return tokens * checks.cost("step", step, positive=True) / round_time


def verify_cost(verify: Verify | None, tokens: int) -> float:
    """The time of a target pass over ``tokens`` tokens, in steps: what ``verify`` says, or 1 if it is None.

    Between the sizes of a mapping it is interpolated linearly, and a pass over one token takes one step unless the mapping
    says otherwise. UserError beyond the largest size, and for a time that is not positive.
    """
    tokens = checks.count("the number of verified tokens", tokens, 1)
    if verify is None:
        return 1.0
    if callable(verify):
        return checks.cost(f"verify({tokens})", verify(tokens), positive=True)
    times = _measured(verify)
    if tokens > (largest := max(times)):
        raise UserError(
            f"verify is known for up to {largest} tokens and {tokens} are asked for; measure more"
        )
    costs = [checks.cost(f"verify[{size}]", time, positive=True) for size, time in times.items()]
    return float(np.interp(tokens, list(times), costs))


def _measured(verify: Mapping[int, float] | Sequence[float]) -> dict[int, float]:
    if not isinstance(verify, Mapping):
        try:
            verify = {place + 1: time for place, time in enumerate(verify)}
        except TypeError:
            told = f"verify is {verify!r:.60}; it must be a function, a mapping or a list of times"
            raise UserError(told) from None
    return dict(
        sorted(
            {
                1: 1.0,
                **{checks.count("a key of verify", n, 1): time for n, time in verify.items()},
            }.items()
        )
    )


def improvement_possible(alpha: float, c: float) -> bool:
    """Whether any gamma speeds decoding up if verification costs one step: exactly if alpha > c. Corollary 3.9."""
    return checks.one_rate("alpha", alpha) > checks.cost("c", c)


def guaranteed_improvement(alpha: Number, c: float) -> Number:
    """The speed-up that the best gamma reaches at least: (1 + alpha) / (1 + c), that of gamma 1, or 1. Corollary 3.9."""
    rate, c = checks.rate("alpha", alpha), checks.cost("c", c)
    return _like(alpha, np.maximum((1 + rate) / (1 + c), 1.0))


def optimal_gamma(
    alpha: float, c: float, limit: int = 256, verify: Verify | None = None
) -> tuple[int, float]:
    """(gamma, speed-up): the number of draft tokens that is fastest, and what it gives; (0, 1.0) if drafting never pays.

    Looks at gamma up to ``limit``, and with measured times no further than they reach; among equals the smallest. Section
    3.5 (``verify`` as in ``walltime_improvement``).
    """
    alpha, limit = checks.one_rate("alpha", alpha), checks.count("limit", limit, 0)
    if verify is not None and not callable(verify):
        limit = min(limit, max(_measured(verify)) - 1)
    best = 0, 1.0
    for gamma in range(1, limit + 1):
        gain = walltime_improvement(alpha, gamma, c, verify)
        if gain > best[1] * (1 + 1e-12):  # not by rounding alone
            best = gamma, gain
    return best


# Work.


def operations(alpha: Number, gamma: int, c_hat: float) -> Number:
    """How many times the arithmetic of plain decoding is done: (gamma c_hat + gamma + 1) / expected tokens, at least 1.

    ``c_hat`` is the draft model's operations per token over the target's. Where arithmetic and not memory is the limit, it
    is a slow-down. Theorem 3.11.
    """
    work = checks.count("gamma", gamma, 0) * checks.cost("c_hat", c_hat) + gamma + 1
    return work / expected_tokens(alpha, gamma)


def used_share(tokens_per_round: float, gamma: int) -> float:
    """r' = tokens per round / (gamma + 1): the share of a round's verified positions that becomes text."""
    share = checks.cost("tokens_per_round", tokens_per_round) / (
        checks.count("gamma", gamma, 0) + 1
    )
    if share > 1 + 1e-9:
        raise UserError(
            f"tokens_per_round is {float(tokens_per_round):g}; a round of gamma {gamma} emits at most {gamma + 1}"
        )
    return share


def rounds(tokens: float, share: float, gamma: int) -> float:
    """Rounds that a text of ``tokens`` tokens takes: tokens / (r' (gamma + 1)), with r' of ``used_share``."""
    used = checks.one_rate("share", share)
    return checks.cost("tokens", tokens) / (
        checks.cost("share", used, positive=True) * (checks.count("gamma", gamma, 0) + 1)
    )


def total_cost(
    tokens: float, share: float, gamma: int, c: float, verify: Verify | None = None
) -> float:
    """Target steps that a text of ``tokens`` tokens costs: rounds * (gamma c + v(gamma + 1)); plain decoding costs tokens."""
    return rounds(tokens, share, gamma) * (
        gamma * checks.cost("c", c) + verify_cost(verify, gamma + 1)
    )


def break_even_share(gamma: int, c: float, verify: Verify | None = None) -> float:
    """What r' must exceed for speculation to pay: (gamma c + v(gamma + 1)) / (gamma + 1). Above 1, no draft pays."""
    gamma = checks.count("gamma", gamma, 0)
    return (gamma * checks.cost("c", c) + verify_cost(verify, gamma + 1)) / (gamma + 1)


def _like(given: Number, values: np.ndarray) -> Number:
    """A float for a number, an array for an array."""
    return values if np.ndim(given) else float(values)  # pyright: ignore[reportReturnType]
