"""Cascades of drafters: the expected walltime improvement factors of CS Drafting, Chen et al. 2023 (2312.11462).

Costs are multiples of a target step, and a pass of any model over several tokens costs as much as over one.
"""

from __future__ import annotations

from collections.abc import Sequence

from specjax import checks
from specjax.errors import UserError
from specjax.theory import chain


def generating_function(x: float, alpha: float, gamma: int) -> float:
    """phi(x) = E[x^T], T the tokens of one round with acceptance ``alpha`` and ``gamma`` draft tokens.

    1 + (x - 1) (1 - (alpha x)^(gamma+1)) / (1 - alpha x), 0 <= x <= 1: from P(T > t) = alpha^t for t <= gamma. Its slope
    at 1 is equation 1 of Leviathan et al. (2211.17192).
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
    """Speed-up of a vertical cascade: the middle model drafts for the target, and the smallest drafts for the middle one.

    The middle model runs ``inner_rounds`` rounds of speculative decoding, n, with ``inner_gamma`` tokens, k, of the
    smallest, accepted at ``inner_alpha``; all that they emit is drafted, and the target accepts each at ``alpha``. With the
    costs c1 of ``middle`` and c2 of ``smallest``: (1 - alpha phi(alpha)^n) / ((1 - alpha) (1 + n c1 + n k c2)), phi of
    ``generating_function``. 2312.11462, analysis of the vertical cascade.
    """
    alpha, inner_alpha = (
        checks.one_rate("alpha", alpha),
        checks.one_rate("inner_alpha", inner_alpha),
    )
    n, k = checks.count("inner_rounds", inner_rounds), checks.count("inner_gamma", inner_gamma)
    # The numerator has the factor 1 - alpha, for 1 - phi(alpha) = (1 - alpha) E: what is left are sums, exact near alpha 1.
    each = chain.expected_tokens(alpha * inner_alpha, k)
    phi = max(1 - (1 - alpha) * each, 0.0)
    tokens = 1 + alpha * each * chain.expected_tokens(phi, n - 1) if n else 1.0
    return tokens / (
        1 + n * checks.cost("middle", middle) + n * k * checks.cost("smallest", smallest)
    )


def horizontal_improvement(
    alphas: Sequence[float], lengths: Sequence[int], costs: Sequence[float]
) -> float:
    """Speed-up of a horizontal cascade: the best drafter writes the first tokens of a draft, lesser ones what follows.

    Drafter j writes ``lengths[j]`` tokens, accepted at ``alphas[j]``, for ``costs[j]`` each. With two of them: (sum_{i=0..n1}
    alpha1^i + alpha1^n1 sum_{i=1..n2} alpha2^i) / (1 + n1 c1 + n2 c2). 2312.11462, analysis of the horizontal cascade.
    """
    try:
        sizes = [len(alphas), len(lengths), len(costs)]
    except TypeError:
        raise UserError(
            "alphas, lengths and costs must be lists; give one of each for every drafter"
        ) from None
    if len(set(sizes)) > 1:
        told = "alphas, lengths and costs have {}, {} and {} entries".format(*sizes)
        raise UserError(f"{told}; give one of each for every drafter")
    tokens, reached, time = 1.0, 1.0, 1.0
    for alpha, length, cost in zip(alphas, lengths, costs, strict=True):
        alpha, length = checks.one_rate("alphas", alpha), checks.count("a length", length)
        time += length * checks.cost("a cost", cost)
        if length:
            tokens += reached * alpha * chain.expected_tokens(alpha, length - 1)
            reached *= alpha**length
    return tokens / time
