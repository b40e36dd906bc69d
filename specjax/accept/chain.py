"""Speculative sampling: accept with probability min(1, target/draft), else draw the residual. L1.

Leviathan, Kalman, Matias 2023 (2211.17192) algorithm 1 and, the same rule, Chen et al. 2023
(2302.01318) algorithm 2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.accept import _verdict
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict

REFERENCE = ("leviathan2023fast", "chen2023accelerating")


def masses(draft: Draft, target_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The probability of each draft token under the target and under the draft, f32[B,N] each.

    A token is accepted with probability min(1, target/draft). Both are 1 where a node does not
    exist: the coin there is not used.
    """

    def gather(probs: jax.Array) -> jax.Array:
        inside = jnp.clip(draft.tokens, 0, probs.shape[-1] - 1)
        mass = jnp.take_along_axis(probs, inside[..., None], axis=-1)[..., 0]
        return jnp.where(draft.valid, mass, 1)

    target_mass = gather(target_probs[:, :-1])
    return target_mass, jnp.ones_like(target_mass) if draft.probs is None else gather(draft.probs)


def leftover(
    accepted: jax.Array, draft: Draft, target_probs: jax.Array, scale: jax.Array | float = 1.0
) -> jax.Array:
    """Weights f32[B,V] (not normalised) of the token after ``accepted`` i32[B] draft tokens.

    After a full chain the target's probs; otherwise the residual max(target - scale * draft, 0)
    (``scale`` a number or f32[B,1]; a deterministic draft is one-hot). Where the residual is 0
    everywhere by rounding, the target's probs.
    """
    probs = _verdict.at(target_probs, accepted)
    nodes = draft.tokens.shape[1]
    if nodes == 0:
        return probs
    node = jnp.minimum(accepted, nodes - 1)
    rejected = (accepted < nodes) & _verdict.at(draft.valid, node)
    taken = scale * _verdict.draft_probs_at(draft, node, probs.shape[-1], probs.dtype)
    residual = jnp.where(rejected[:, None], jnp.maximum(probs - taken, 0), probs)
    return jnp.where(residual.sum(-1, keepdims=True) > 0, residual, probs)


def chain(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft``: N nodes, any of them may be invalid; ``target_probs`` f32[B,N+1,V]."""
    exists = _verdict.chain_nodes(draft)
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    kept = coins.flip(*masses(draft, target_probs))
    accepted = _verdict.first_failure(kept & exists)
    token = keys.draw(RESIDUAL, leftover(accepted, draft, target_probs))
    return _verdict.prefix(draft, accepted, token)


def make() -> Accept:
    """Speculative sampling on chains."""
    return Accept(chain, _verdict.greedy, "chain", "L1")
