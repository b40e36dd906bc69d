"""Non-iterative rejection sampling: the naive baseline. Keep with probability target / (M * draft), else draw anew. L1.

Leviathan et al. 2023 (2211.17192), appendix A.2: M = max target/draft over the vocabulary. The token drawn anew comes from the
target itself, not from a residual. Exact, and never better than ``chain``: acceptance 1/M instead of sum(min(target, draft)).
A deterministic draft is never accepted, unless the target is as certain.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.accept import _verdict
from specjax.accept.chain import masses
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict


def rejection(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft`` N nodes, ``target_probs`` f32[B,N+1,V]; any number of nodes may be invalid. L1."""
    exists = _verdict.chain_nodes(draft)
    target_mass, draft_mass = masses(draft, target_probs)
    laws = jax.nn.one_hot(draft.tokens, target_probs.shape[-1], dtype=target_probs.dtype)
    laws = laws if draft.probs is None else draft.probs
    here = target_probs[:, :-1]
    # 1/M = min draft/target over what the target can say: no division by zero.
    share = jnp.where(here > 0, laws / jnp.where(here > 0, here, 1), jnp.inf).min(-1)
    share = jnp.where(exists, share, 0)
    kept = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(
        target_mass * share, draft_mass
    )
    accepted = _verdict.first_failure(kept & exists)
    return _verdict.prefix(
        draft, accepted, keys.draw(RESIDUAL, _verdict.at(target_probs, accepted))
    )


def make() -> Accept:
    """Non-iterative rejection sampling on chains."""
    return Accept(rejection, _verdict.greedy, "rejection", "L1")
