"""Deterministic candidates: keep a child with the target's own probability, else strike it out and try the next. L1.

The rule of EAGLE-2 (Li et al. 2024, 2406.16858) and its successors, and of every tree of top-k tokens, templates, tries and
n-grams: a child is accepted with probability target(child), a rejected one is given no mass, the rest is normalised. A node
is passed with probability sum(target(child)). Card B5.

Whatever the children are, and however they were chosen, the token that stands has the target's law: this is sample-then-match
with another use of the noise. So any draft will do. A draft that was *sampled* loses acceptance here: its law is ignored.
"""

from __future__ import annotations

import jax

from specjax.accept import _verdict
from specjax.accept.recursive import recursive
from specjax.rng import RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict


def deterministic(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``target_probs`` f32[B,N+1,V]; ``Draft.probs`` is not looked at. L1."""
    return recursive(keys, draft.replace(probs=None), target_probs)


def make() -> Accept:
    """Deterministic candidates, in any topology."""
    return Accept(deterministic, _verdict.greedy, "deterministic", "L1", SIBLINGS)
