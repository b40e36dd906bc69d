"""Sample-then-match with noise that the drafter draws with too: coupled drafts. L1.

The target's token at a position is the one with the highest log-probability plus Gumbel noise. A
drafter with ``siblings="coupled"`` adds the same noise to its own log-probabilities, so both choose
the same token with a probability of at least (1 - d) / (1 + d), where d is their total variation
(Daliri et al. 2024, 2408.07978); sample-then-match with other noise has sum(target * draft). The
text depends on the target and the keys alone: any drafter gives the same text, bit for bit where
the logits are equal, and so does ``none``, plain decoding. With ``streams`` K there are K draws of
noise, one for each sibling, and the target adds the largest of them (Gumbel-max list sampling,
Rowan et al. 2025, 2506.05632; here the target always reads all K, and the text still depends on
nothing else).
"""

from __future__ import annotations

import jax

from specjax import declare
from specjax.accept import verdict
from specjax.declare import key
from specjax.rng import RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict

REFERENCE = ("daliri2024coupling", "rowan2025list")


class Keys(declare.Keys):
    """The keys of ``coupled``."""

    streams: int = key(
        1,
        "draws of noise per position: as many as a node of the draft has children, 1 for chains. "
        "Another number is another text",
        least=1,
        most=64,
    )


@declare.method(Keys)
def make(own: Keys) -> Accept:
    """Sample-then-match with shared noise, in any topology.

    Raises:
        UserError: a value out of range.
    """

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        def draw(depth: jax.Array, probs: jax.Array, active: jax.Array) -> jax.Array:
            return keys.draw_coupled(depth, probs, own.streams, active)

        return verdict.matched(draw, draft, target_probs)

    return Accept(sampled, verdict.greedy, "coupled", "L1", SIBLINGS)
