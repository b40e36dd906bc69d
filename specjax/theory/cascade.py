"""Cascades of drafters: expected walltime improvement, CS Drafting, Chen et al. 2023 (2312.11462).

Costs are multiples of a target step. A pass over several tokens costs the same as over one token,
for every model.
"""

from __future__ import annotations

from collections.abc import Sequence

from specjax import checks
from specjax.errors import UserError
from specjax.theory import chain


def generating_function(x: float, alpha: float, gamma: int) -> float:
    """phi(x) = E[x^T], 0 <= x <= 1: T are the tokens of one round with ``gamma`` draft tokens.

    With acceptance ``alpha``, P(T > t) = alpha^t for t <= gamma, so phi(x) = 1 + (x - 1)
    (1 - (alpha x)^(gamma+1)) / (1 - alpha x). Its slope at 1 is equation 1 of Leviathan et al.
    (2211.17192).
    """
    x, alpha = checks.one_rate("x", x), checks.one_rate("alpha", alpha)
    return 1 + (x - 1) * chain.expected_tokens(alpha * x, gamma)


def vertical_improvement(
    alpha: float,
    inner_alpha: float,
    inner_rounds: int,
    inner_gamma: int,
    middle: float,
    smallest: float,
) -> float:
    """Speed-up of a vertical cascade: a middle model drafts, and a smallest model drafts for it.

    The middle model runs n = ``inner_rounds`` rounds of speculative decoding with k =
    ``inner_gamma`` tokens of the smallest, accepted at ``inner_alpha``. All emitted tokens are
    drafts, and the target accepts each at ``alpha``. With the costs c1 of ``middle`` and c2 of
    ``smallest``: (1 - alpha phi(alpha)^n) / ((1 - alpha) (1 + n c1 + n k c2)), phi of
    ``generating_function``. 2312.11462, analysis of the vertical cascade.
    """
    alpha = checks.one_rate("alpha", alpha)
    inner_alpha = checks.one_rate("inner_alpha", inner_alpha)
    n, k = checks.count("inner_rounds", inner_rounds), checks.count("inner_gamma", inner_gamma)
    # The numerator has the factor 1 - alpha, because 1 - phi(alpha) = (1 - alpha) E. Without this
    # factor it is a sum, which is exact for alpha near 1.
    each = chain.expected_tokens(alpha * inner_alpha, k)
    phi = max(1 - (1 - alpha) * each, 0.0)
    tokens = 1 + alpha * each * chain.expected_tokens(phi, n - 1) if n else 1.0
    middle, smallest = checks.cost("middle", middle), checks.cost("smallest", smallest)
    return tokens / (1 + n * middle + n * k * smallest)


def horizontal_improvement(
    alphas: Sequence[float], lengths: Sequence[int], costs: Sequence[float]
) -> float:
    """Speed-up of a horizontal cascade: several drafters write the parts of one draft, in order.

    Drafter j writes ``lengths[j]`` tokens, accepted at ``alphas[j]``, at a cost of ``costs[j]``
    each. With two of them: (sum_{i=0..n1} alpha1^i + alpha1^n1 sum_{i=1..n2} alpha2^i) /
    (1 + n1 c1 + n2 c2). 2312.11462, analysis of the horizontal cascade.
    """
    _check_sizes(alphas, lengths, costs)
    tokens, reached, time = 1.0, 1.0, 1.0
    for alpha, length, cost in zip(alphas, lengths, costs, strict=True):
        alpha, length = checks.one_rate("alphas", alpha), checks.count("a length", length)
        time += length * checks.cost("a cost", cost)
        if length:
            tokens += reached * alpha * chain.expected_tokens(alpha, length - 1)
            reached *= alpha**length
    return tokens / time


def escalated_improvement(
    shares: Sequence[float],
    alphas: Sequence[float],
    lengths: Sequence[int],
    costs: Sequence[float],
    verify: chain.Verify | None = None,
) -> float:
    """Speed-up of ``escalate``: drafters are asked in turn, and the first one with a draft drafts.

    Drafter j drafts in the share f_j = ``shares[j]`` of the rounds: k_j = ``lengths[j]`` tokens,
    accepted at ``alphas[j]``, at a cost of ``costs[j]`` each. The other rounds have no draft. With
    v of ``verify`` (as in ``chain.walltime_improvement``) and E_j of equation 1: (1 - sum_j f_j +
    sum_j f_j E_j) / (1 - sum_j f_j + sum_j f_j (v(k_j + 1) + k_j c_j)). So a cheap first drafter
    pays if its rounds have more tokens per time than those of the next one. Asking a drafter that
    has no draft, and reading what a draft model missed, cost nothing here. Spector and Ré 2023
    (2308.04623) build such drafters; the formula is equation 1 for each kind of round.
    """
    _check_sizes(alphas, lengths, costs, shares)
    rest = 1 - sum(checks.one_rate("shares", share) for share in shares)
    if rest < -1e-9:
        raise UserError(f"the shares add up to {1 - rest:g}; they must be shares of all rounds")
    tokens = time = max(rest, 0.0)
    for share, alpha, length, cost in zip(shares, alphas, lengths, costs, strict=True):
        alpha, length = checks.one_rate("alphas", alpha), checks.count("a length", length)
        tokens += share * chain.expected_tokens(alpha, length)
        each = length * checks.cost("a cost", cost) + chain.verify_cost(verify, length + 1)
        time += share * each
    return tokens / time


def _check_sizes(*lists: Sequence) -> None:
    """Raises UserError unless these are lists of the same length."""
    try:
        sizes = [len(each) for each in lists]
    except TypeError:
        raise UserError("an argument is no list; give one entry for every drafter") from None
    if len(set(sizes)) > 1:
        raise UserError(f"the lists have {sizes} entries; give one in each for every drafter")
