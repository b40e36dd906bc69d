"""Non-iterative rejection sampling, a naive baseline: accept with target / (M * draft). L1.

Leviathan et al. 2023 (2211.17192), appendix A.2: M = max target/draft over the vocabulary. After a
rejection the token is drawn from the target itself, not from a residual. Exact, and never better
than ``chain``: acceptance 1/M instead of sum(min(target, draft)). A deterministic draft is accepted
only where the target gives its token probability 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.accept import verdict
from specjax.accept.verdict import masses
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict

REFERENCE = "leviathan2023fast"


def rejection(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft``: N nodes, any of them may be invalid; ``target_probs`` f32[B,N+1,V]."""
    target_mass, draft_mass = masses(draft, target_probs)
    probs = jax.nn.one_hot(draft.tokens, target_probs.shape[-1], dtype=target_probs.dtype)
    probs = probs if draft.probs is None else draft.probs
    here = target_probs[:, :-1]
    # 1/M = min draft/target over the tokens of positive target probability: no division by zero.
    share = jnp.where(here > 0, probs / jnp.where(here > 0, here, 1), jnp.inf).min(-1)
    share = jnp.where(draft.valid, share, 0)
    accepted = verdict.in_order(keys, draft, target_mass * share, draft_mass)
    return verdict.prefix(draft, accepted, keys.draw(RESIDUAL, verdict.at(target_probs, accepted)))


def make() -> Accept:
    """Non-iterative rejection sampling on chains."""
    return Accept(rejection, verdict.greedy, "rejection", "L1")
