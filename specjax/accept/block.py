"""Block verification: the whole chain is judged jointly, and the longest part that stands is kept. L1.

Sun et al. 2025 (2403.10444), algorithm 2. Never fewer tokens in expectation than ``chain``, from the same inputs: what a
likely prefix has in reserve pays for an unlikely token after it. A failure on the way is no end, only the last success counts.
With deterministic drafts it is the token-wise rule.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.accept import _verdict
from specjax.accept.chain import leftover, masses
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict


def weights(draft: Draft, target_probs: jax.Array) -> jax.Array:
    """f32[B,N+1]: entry i is min(1, entry i-1 * target(x_i) / draft(x_i)), how much of the prefix's draft mass can stand."""
    target_mass, draft_mass = masses(draft, target_probs)
    ratio = jnp.where(
        draft_mass > 0, target_mass / jnp.where(draft_mass > 0, draft_mass, 1), target_mass > 0
    )

    def step(weight, ratio):
        weight = jnp.minimum(1, weight * ratio)
        return weight, weight

    one = jnp.ones(ratio.shape[:1], ratio.dtype)
    return jnp.concatenate([one[:, None], jax.lax.scan(step, one, ratio.T)[1].T], 1)


def chances(
    draft: Draft, target_probs: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """f32[B,N] each, numerator and denominator: the chance that the first i+1 tokens stand, if no more do.

    The last token's is its weight; before it, mass that the next position still owes, over itself plus what was lost.
    """
    count = _verdict.first_failure(_verdict.chain_nodes(draft))[:, None]
    size, vocab = draft.tokens.shape[1], target_probs.shape[-1]
    if draft.probs is None:
        next_law = jax.nn.one_hot(draft.tokens, vocab, dtype=target_probs.dtype)
    else:
        next_law = jnp.where(draft.valid[..., None], draft.probs, 0)
    owed = jnp.maximum(weight[:, 1:-1, None] * target_probs[:, 1:-1] - next_law[:, 1:], 0).sum(-1)
    owed = jnp.pad(owed, ((0, 0), (0, 1)))  # of the last node: never used
    place = jnp.arange(1, size + 1)
    here = weight[:, 1:]
    kept = jnp.where(place == count, here, jnp.where(place < count, owed, 0))
    total = jnp.where(
        place == count, 1, jnp.where(place < count, owed + (1 - here), 0)
    )  # 1 - here first: it may be 0, owed small
    return kept, total


def block(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft`` N nodes, ``target_probs`` f32[B,N+1,V]; any number of nodes may be invalid. L1."""
    size = draft.tokens.shape[1]
    if size == 0:
        zero = jnp.zeros(draft.tokens.shape[:1], jnp.int32)
        return _verdict.prefix(draft, zero, keys.draw(RESIDUAL, target_probs[:, 0]))
    weight = weights(draft, target_probs)
    stands = keys.coins(size, target_probs.dtype).flip(*chances(draft, target_probs, weight))
    accepted = jnp.max(jnp.where(stands, jnp.arange(1, size + 1), 0), -1)
    return _verdict.prefix(
        draft, accepted, keys.draw(RESIDUAL, after(accepted, draft, target_probs, weight))
    )


def after(
    accepted: jax.Array, draft: Draft, target_probs: jax.Array, weight: jax.Array
) -> jax.Array:
    """The law f32[B,V] (not normalised) of the token after the accepted ones: max(weight * target - draft, 0)."""
    scale = _verdict.at(weight, accepted)
    return leftover(accepted, draft, target_probs, (1 / jnp.where(scale > 0, scale, 1))[:, None])


def make() -> Accept:
    """Block verification on chains."""
    return Accept(block, _verdict.greedy, "block", "L1", whole=True)
