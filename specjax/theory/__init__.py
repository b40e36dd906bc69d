"""What speculative decoding should give: closed forms and cost models, on the host, in NumPy.

Chains of draft tokens are here by name (``theory.expected_tokens``); ``theory.goodput`` chooses a draft length under load,
``theory.cascade`` prices drafters that are drafted for themselves, ``theory.roofline`` models a machine that nobody has at
hand. ``tree_search`` does the same for trees.

Letters: alpha is the acceptance rate, gamma the number of draft tokens in a round, c the time of drafting one token; times
are multiples of one step, a target pass over one token. A mistaken argument (a rate outside 0 to 1, a negative or NaN cost,
gamma that is no whole number) raises UserError everywhere.
"""

from specjax.theory import cascade, goodput, roofline
from specjax.theory.chain import (
    Verify,
    acceptance_rate,
    break_even_share,
    divergence,
    expected_tokens,
    expected_tokens_by_depth,
    guaranteed_improvement,
    improvement_possible,
    operations,
    optimal_gamma,
    oracle_tokens,
    overlap,
    rounds,
    speedup,
    total_cost,
    used_share,
    verify_cost,
    walltime_improvement,
)

__all__ = [
    "Verify",
    "acceptance_rate",
    "break_even_share",
    "cascade",
    "divergence",
    "expected_tokens",
    "expected_tokens_by_depth",
    "goodput",
    "guaranteed_improvement",
    "improvement_possible",
    "operations",
    "optimal_gamma",
    "oracle_tokens",
    "overlap",
    "roofline",
    "rounds",
    "speedup",
    "total_cost",
    "used_share",
    "verify_cost",
    "walltime_improvement",
]
