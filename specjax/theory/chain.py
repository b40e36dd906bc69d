"""Chains of draft tokens, with assumed or measured costs.

Leviathan et al. 2023 (2211.17192), sections 3.1 to 3.5. Numbers of equations and theorems are those
of this paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from specjax import checks
from specjax.errors import UserError

Number = TypeVar("Number", float, np.ndarray)

Verify = Callable[[int], float] | Mapping[int, float] | Sequence[float]
"""The time of a target pass over n tokens, in steps.

A function of n, times by n (interpolated between them), or a list with entry i for i + 1 tokens.
"""


# Acceptance.


def overlap(target: npt.ArrayLike, draft: npt.ArrayLike) -> np.ndarray:
    """beta = sum_x min(target(x), draft(x)): the acceptance probability of a token from ``draft``.

    Probabilities [...,V] under the same sampling settings -> f64[...]. Section 3.2, Theorem 3.5.
    """
    return np.minimum(*_pair(target, draft)).sum(-1)


def divergence(target: npt.ArrayLike, draft: npt.ArrayLike) -> np.ndarray:
    """``D_LK = sum_x |target(x) - M(x)|``, M the mean of both: the probability of a rejection.

    Probabilities [...,V] -> f64[...], symmetric, 0 for equal and 1 for disjoint distributions. It
    is the total variation distance, and 1 - ``overlap`` (Lemma 3.3). Definition 3.2.
    """
    target, draft = _pair(target, draft)
    return np.abs(target - (target + draft) / 2).sum(-1)


def best_acceptance(target: npt.ArrayLike, draft: npt.ArrayLike, count: int) -> np.ndarray:
    """The largest chance that the emitted token is one of ``count`` independent draft draws.

    The maximum is over all rules that emit ``target``: optimal transport with membership cost
    (SpecTr, Sun et al. 2023, 2310.15141, section 3). It is the minimum of
    ``target(H) + 1 - draft(H)**count`` over sets H of tokens, the smallest cut of a transport from
    sets of draws to tokens. As x**count is convex, some H with the lowest ratios of target to draft
    is a smallest one, so V + 1 sets are compared. With one draw it is ``overlap``.

    Probabilities [...,V] under the same sampling settings -> f64[...].
    """
    target, draft = _pair(target, draft)
    count = checks.whole("count", count, 1)
    # Tokens that the draft never draws have an infinite ratio: their sum in H gains nothing.
    ratios = np.where(draft > 0, target / np.where(draft > 0, draft, 1), np.inf)
    order = np.argsort(ratios, -1)
    kept, drawn = (np.take_along_axis(each, order, -1).cumsum(-1) for each in (target, draft))
    return np.minimum((kept - np.minimum(drawn, 1) ** count).min(-1), 0) + 1


def acceptance_rate(
    target_probs: npt.ArrayLike, draft_probs: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> float:
    """alpha = E[beta]: the mean overlap of probabilities [...,V] at the same positions.

    The mean is weighted by ``weights`` [...]. Give every position of text that the target wrote:
    positions that a draft reached, or where one was rejected, are a biased choice. Corollary 3.6.
    """
    values = overlap(target_probs, draft_probs)
    if not values.size:
        raise UserError("the probabilities have no position; give at least one")
    if weights is None:
        return float(values.mean())
    shares = checks.numbers("weights", weights)
    if shares.shape != values.shape:
        raise UserError(f"weights has shape {shares.shape}; it must be {values.shape}")
    if (shares < 0).any() or not shares.sum() > 0:
        raise UserError("weights must be at least 0, and not all 0")
    return float(np.average(values, weights=shares))


def _pair(target: npt.ArrayLike, draft: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    first = checks.probabilities("the target's distribution", target)
    second = checks.probabilities("the draft's distribution", draft)
    if first.shape != second.shape:
        raise UserError(
            f"the target's probabilities have shape {first.shape} and the draft's {second.shape}; "
            "give equal shapes"
        )
    return first, second


# Tokens per round.


def expected_tokens(alpha: Number, gamma: int) -> Number:
    """Tokens per round with independent acceptance of probability ``alpha``: equation 1.

    (1 - alpha^(gamma+1)) / (1 - alpha), between 1 and gamma + 1; for each entry of an array.
    """
    rate, gamma = checks.rate("alpha", alpha), checks.count("gamma", gamma, 0)
    # alpha 0 gives log 0, and alpha 1 gives 0/0, which is replaced below.
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens = -np.expm1((gamma + 1) * np.log(rate)) / (1 - rate)
    return _like(alpha, np.where(rate == 1, gamma + 1.0, tokens))


def expected_tokens_by_depth(acceptance: Sequence[float]) -> float:
    """Tokens per round from the conditional acceptance at each depth: 1 + sum of running products.

    Equation 1 without the assumption of equal acceptance at all depths.
    """
    rates = checks.rate("acceptance", acceptance)
    if rates.ndim != 1:
        raise UserError(f"acceptance has shape {rates.shape}; give a list, one rate per depth")
    return 1 + float(np.cumprod(rates).sum())


def equal_rate(tokens_per_round: float, gamma: int) -> float:
    """The alpha for which equation 1 gives these tokens per round: the inverse of equation 1.

    Raises UserError unless they are between 1 and gamma + 1.
    """
    tokens, gamma = tokens_of(tokens_per_round, gamma)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return high


def minimum_variance_rates(tokens_per_round: float, gamma: int) -> list[float]:
    """The conditional acceptance at each of gamma depths: as few different lengths as possible.

    tokens_per_round - 1 is a whole number m and a share s: the first m draft tokens are always
    accepted, the next one with probability s, and no further one. Of all distributions of accepted
    tokens with this mean it has the least variance, s (1 - s). It is the schedule of "synthetic"
    acceptance in vLLM. Raises UserError unless the tokens are between 1 and gamma + 1.
    """
    tokens, gamma = tokens_of(tokens_per_round, gamma)
    return np.clip(tokens - 1 - np.arange(gamma), 0.0, 1.0).tolist()


def tokens_of(value: float, gamma: int, name: str = "tokens_per_round") -> tuple[float, int]:
    """Tokens per round and gamma, checked. Raises UserError."""
    tokens, gamma = checks.cost(name, value), checks.count("gamma", gamma)
    if not 1 <= tokens <= gamma + 1:
        raise UserError(
            f"{name} is {value}; it must be between 1 and gamma + 1, which is {gamma + 1}"
        )
    return tokens, gamma


# Time.


def walltime_improvement(
    alpha: Number, gamma: int, c: float, verify: Verify | None = None
) -> Number:
    """Speed-up over plain decoding: expected tokens / (gamma c + v(gamma + 1)).

    Without ``verify`` the cost of a pass over gamma + 1 tokens is one step: Theorem 3.8. With it,
    the cost is the time measured for that many tokens.
    """
    gamma = checks.count("gamma", gamma)
    round_time = gamma * checks.cost("c", c) + verify_cost(verify, gamma + 1)
    return expected_tokens(alpha, gamma) / round_time


def speedup(tokens_per_round: float, draft: float, verify: float, step: float = 1.0) -> float:
    """Speed-up over plain decoding, from measured times in any one unit.

    ``draft`` and ``verify`` are the times of a round, ``step`` that of a target pass over one
    token. Theorem 3.8 without the assumption that verification costs one step.
    """
    tokens = checks.cost("tokens_per_round", tokens_per_round)
    round_time = checks.cost("draft", draft) + checks.cost("verify", verify, positive=True)
    return tokens * checks.cost("step", step, positive=True) / round_time


def loop_factors(
    tokens_per_round: float, gamma: int, c: float, verify: Verify | None = None
) -> tuple[float, float]:
    """(r', the speed-up if all tokens were accepted): the speed-up is the product.

    r' = tokens per round / (gamma + 1) is the share of a round's tokens that is emitted, and falls
    with gamma. The other factor, (gamma + 1) / (gamma c + v(gamma + 1)), rises. Chen et al. 2023
    (2302.01318), figure 1, where gamma is K.
    """
    tokens, gamma = tokens_of(tokens_per_round, gamma)
    return tokens / (gamma + 1), walltime_improvement(1.0, gamma, c, verify)


def verify_cost(verify: Verify | None, tokens: int) -> float:
    """The time of a target pass over ``tokens`` tokens, in steps: from ``verify``, or 1 if None.

    Interpolated linearly between the sizes of a mapping. A pass over one token takes one step
    unless the mapping has that size. Raises UserError beyond the largest size, and for a time that
    is not positive.
    """
    tokens = checks.count("the number of verified tokens", tokens, 1)
    if verify is None:
        return 1.0
    if callable(verify):
        return checks.cost(f"verify({tokens})", verify(tokens), positive=True)
    times = _measured(verify)
    if tokens > (largest := max(times)):
        raise UserError(
            f"verify has times for up to {largest} tokens, not for {tokens}; measure larger passes"
        )
    costs = [checks.cost(f"verify[{size}]", time, positive=True) for size, time in times.items()]
    return float(np.interp(tokens, list(times), costs))


def _measured(verify: Mapping[int, float] | Sequence[float]) -> dict[int, float]:
    if not isinstance(verify, Mapping):
        try:
            verify = {place + 1: time for place, time in enumerate(verify)}
        except TypeError:
            wrong = f"verify is {verify!r:.60}"
            right = "it must be a function, a mapping or a list of times"
            raise UserError(f"{wrong}; {right}") from None
    times = {checks.count("a key of verify", n, 1): time for n, time in verify.items()}
    return dict(sorted({1: 1.0, **times}.items()))


def optimal_gamma(
    alpha: float, c: float, limit: int = 256, verify: Verify | None = None
) -> tuple[int, float]:
    """(gamma, speed-up) of the fastest number of draft tokens; (0, 1.0) if no draft is faster.

    Tries gamma up to ``limit``, and with measured times up to the largest measured pass; among
    equals the smallest. ``verify`` as in ``walltime_improvement``. Section 3.5.
    """
    alpha, limit = checks.one_rate("alpha", alpha), checks.count("limit", limit, 0)
    if verify is not None and not callable(verify):
        limit = min(limit, max(_measured(verify)) - 1)
    best = 0, 1.0
    for gamma in range(1, limit + 1):
        value = walltime_improvement(alpha, gamma, c, verify)
        if value > best[1] * (1 + 1e-12):  # by more than rounding
            best = gamma, value
    return best


# Work.


def operations(alpha: Number, gamma: int, c_hat: float) -> Number:
    """Arithmetic as a multiple of plain decoding: (gamma c_hat + gamma + 1) / expected tokens.

    At least 1. ``c_hat`` is the draft model's operations per token over the target's. It is the
    slow-down where arithmetic, not memory, is the limit. Theorem 3.11.
    """
    work = checks.count("gamma", gamma, 0) * checks.cost("c_hat", c_hat) + gamma + 1
    return work / expected_tokens(alpha, gamma)


def _like(given: Number, values: np.ndarray) -> Number:
    """A float for a number, an array for an array."""
    return values if np.ndim(given) else float(values)  # pyright: ignore[reportReturnType]
