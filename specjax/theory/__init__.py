"""The expected gain of speculative decoding: closed forms and cost models, on the host, in NumPy.

The functions for chains of draft tokens are names of this package (``theory.expected_tokens``).
``theory.cascade`` gives the speed-up of drafters that use others, and ``theory.roofline`` models
hardware that is not available. ``theory.scaling`` predicts speed and memory for the accelerators of
``theory.devices``. ``theory.load`` simulates a server, with the draft lengths of
``theory.policies``. For trees see ``specjax.topology.search``.

Symbols: alpha is the acceptance rate, gamma the number of draft tokens in a round, c the time of
drafting one token. Times are multiples of one step, a target pass over one token. Every function
raises UserError for an invalid argument (a rate outside 0 to 1, a negative or NaN cost, a gamma
that is not a whole number).
"""

from specjax.theory import (
    acceptance,
    cascade,
    devices,
    load,
    policies,
    roofline,
    round_costs,
    scaling,
)
from specjax.theory.chain import (
    Verify,
    acceptance_rate,
    best_acceptance,
    divergence,
    equal_rate,
    expected_tokens,
    expected_tokens_by_depth,
    loop_factors,
    minimum_variance_rates,
    operations,
    optimal_gamma,
    overlap,
    speedup,
    verify_cost,
    walltime_improvement,
)

__all__ = [
    "Verify",
    "acceptance",
    "acceptance_rate",
    "best_acceptance",
    "cascade",
    "devices",
    "divergence",
    "equal_rate",
    "expected_tokens",
    "expected_tokens_by_depth",
    "load",
    "loop_factors",
    "minimum_variance_rates",
    "operations",
    "optimal_gamma",
    "overlap",
    "policies",
    "roofline",
    "round_costs",
    "scaling",
    "speedup",
    "verify_cost",
    "walltime_improvement",
]
