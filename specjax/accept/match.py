"""Sample-then-match: the target's own sampler draws a token; an equal draft token is accepted. L1.

Only token ids are compared, so any draft is valid, chain or tree, and its probabilities are not
read. On a tree it is the naive sampling of SpecInfer (Miao et al. 2024, 2305.09781). It accepts
less: sum(target * draft) instead of sum(min(target, draft)). The sampler's noise is keyed by
absolute position. With equal logits the output is therefore bit for bit that of plain decoding
with the same keys, which makes this rule the strongest regression test.
"""

from __future__ import annotations

import jax

from specjax.accept import verdict
from specjax.rng import RowKeys
from specjax.types import UNCOUPLED, Accept, Draft, Verdict

REFERENCE = "miao2024specinfer"


def match(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``target_probs`` f32[B,N+1,V]. The drawn token is emitted at a mismatch too."""
    return verdict.matched(keys.draw_at, draft, target_probs)


def make() -> Accept:
    """Sample-then-match, in any topology."""
    return Accept(match, verdict.greedy, "match", "L1", UNCOUPLED)
