"""What a new rule needs: verdicts from accepted nodes, and reading a draft.

A complete rule for chains. It tests the tokens one after another, and draws the token after them
from what is left of the target's probabilities:

    def sampled(keys, draft, target_probs):
        exists = verdict.chain_nodes(draft)
        coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
        target_mass, draft_mass = verdict.masses(draft, target_probs)
        passed = coins.flip(target_mass, draft_mass) & exists
        accepted = verdict.first_failure(passed)
        token = keys.draw(rng.RESIDUAL, verdict.leftover(accepted, draft, target_probs))
        return verdict.prefix(draft, accepted, token)


    rule = Accept(sampled, verdict.greedy, "mine", "L1", (types.CHAIN,))
    print(testing.check_accept(rule))

Drafts of 0 nodes occur. All arrays then have an axis of size 0, and the rule must draw a token from
``target_probs[:, 0]``. ``leftover`` and ``prefix`` do so; indexing the draft would raise.

For trees see ``specjax.accept.recursive``, which uses ``before``, ``parents`` and ``along``.
"""

from specjax.accept._verdict import (
    along,
    at,
    chain_nodes,
    deepest,
    draft_probs_at,
    first_failure,
    greedy,
    prefix,
)
from specjax.accept._walk import before, depths, parents
from specjax.accept.chain import leftover, masses

__all__ = [
    "along",
    "at",
    "before",
    "chain_nodes",
    "deepest",
    "depths",
    "draft_probs_at",
    "first_failure",
    "greedy",
    "leftover",
    "masses",
    "parents",
    "prefix",
]
