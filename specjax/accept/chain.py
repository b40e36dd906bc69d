"""Speculative sampling: accept with probability min(1, target/draft), else draw the residual. L1.

Leviathan, Kalman, Matias 2023 (2211.17192) algorithm 1 and, the same rule, Chen et al. 2023
(2302.01318) algorithm 2.
"""

from __future__ import annotations

import jax

from specjax.accept import verdict
from specjax.accept.verdict import leftover, masses
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict

REFERENCE = ("leviathan2023fast", "chen2023accelerating")


def chain(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft``: N nodes, any of them may be invalid; ``target_probs`` f32[B,N+1,V]."""
    accepted = verdict.in_order(keys, draft, *masses(draft, target_probs))
    token = keys.draw(RESIDUAL, leftover(accepted, draft, target_probs))
    return verdict.prefix(draft, accepted, token)


def make() -> Accept:
    """Speculative sampling on chains."""
    return Accept(chain, verdict.greedy, "chain", "L1")
