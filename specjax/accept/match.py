"""Sample-then-match: the target's own sampler draws a token everywhere, and draft tokens that equal it stand. L1.

Only token ids are compared, so any draft will do, and its law is not needed. The price is acceptance: sum(target * draft)
instead of sum(min(target, draft)). The sampler's noise is keyed by absolute position, so that with equal logits the
output is, bit for bit, that of plain decoding with the same keys: the strongest regression test there is (card A5).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.accept import _chain
from specjax.rng import RowKeys
from specjax.types import Accept, Draft, Verdict


def match(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``target_probs`` f32[B,N+1,V]. The token emitted at a mismatch is the drawn one: never drawn again. L1."""
    depth = jnp.arange(target_probs.shape[1])
    return _chain.match(draft, sampling.draw_rows(keys.at_position(depth), target_probs))


def make() -> Accept:
    """Sample-then-match on chains."""
    return Accept(match, _chain.match, "match", "L1")
