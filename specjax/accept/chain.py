"""Speculative sampling: accept a draft token with probability min(1, target/draft), else draw from the residual. L1.

Leviathan, Kalman, Matias 2023 (2211.17192) algorithm 1 and, the same rule, Chen et al. 2023 (2302.01318) algorithm 2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.accept import _verdict
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict


def masses(draft: Draft, target_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the two laws give each drafted token, f32[B,N] both: it is kept with probability min(1, target/draft).

    (1, 1) where there is no node: a coin nobody looks at.
    """

    def gather(probs: jax.Array) -> jax.Array:
        inside = jnp.clip(draft.tokens, 0, probs.shape[-1] - 1)
        return jnp.where(
            draft.valid, jnp.take_along_axis(probs, inside[..., None], axis=-1)[..., 0], 1
        )

    target_mass = gather(target_probs[:, :-1])
    return target_mass, jnp.ones_like(target_mass) if draft.probs is None else gather(draft.probs)


def leftover(
    accepted: jax.Array, draft: Draft, target_probs: jax.Array, scale: jax.Array | float = 1.0
) -> jax.Array:
    """The law f32[B,V] (not normalised) of the token after ``accepted`` i32[B] draft tokens.

    The target's after a full chain, otherwise the residual max(target - scale * draft, 0) (``scale`` a number or
    f32[B,1]); a deterministic draft is the one-hot law of its token. A residual lost to rounding falls back to the target's
    law.
    """
    law = _verdict.at(target_probs, accepted)
    nodes = draft.tokens.shape[1]
    if nodes == 0:
        return law
    node = jnp.minimum(accepted, nodes - 1)
    rejected = (accepted < nodes) & _verdict.at(draft.valid, node)
    taken = scale * _verdict.law_of(draft, node, law.shape[-1], law.dtype)
    residual = jnp.where(rejected[:, None], jnp.maximum(law - taken, 0), law)
    return jnp.where(residual.sum(-1, keepdims=True) > 0, residual, law)


def chain(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft`` N nodes, ``target_probs`` f32[B,N+1,V]; any number of nodes may be invalid. L1."""
    exists = _verdict.chain_nodes(draft)
    kept = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(*masses(draft, target_probs))
    accepted = _verdict.first_failure(kept & exists)
    return _verdict.prefix(
        draft, accepted, keys.draw(RESIDUAL, leftover(accepted, draft, target_probs))
    )


def make() -> Accept:
    """Speculative sampling on chains."""
    return Accept(chain, _verdict.greedy, "chain", "L1")
