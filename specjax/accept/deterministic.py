"""Deterministic candidates: accept a child with its target probability, else remove it. L1.

The rule of EAGLE-2 (Li et al. 2024, 2406.16858), for trees of top-k tokens, templates, tries and
n-grams: a child is accepted with probability target(child); a rejected child gets probability 0,
the rest is normalised, and the next child is tried. One of the children is accepted with
probability sum(target(child)).

The emitted token has the target's distribution for any children, however they were chosen: the
rule is sample-then-match with another use of the noise. It ignores ``Draft.probs``, so a draft that
was *sampled* loses acceptance here.
"""

from __future__ import annotations

import jax

from specjax.accept import verdict
from specjax.accept.recursive import recursive
from specjax.rng import RowKeys
from specjax.types import UNCOUPLED, Accept, Draft, Verdict

REFERENCE = "li2024eagle2"


def deterministic(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``target_probs`` f32[B,N+1,V]; ``Draft.probs`` is not read."""
    return recursive(keys, draft.replace(probs=None), target_probs)


def make() -> Accept:
    """Deterministic candidates, in any topology."""
    return Accept(deterministic, verdict.greedy, "deterministic", "L1", UNCOUPLED)
