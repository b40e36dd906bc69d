"""Speculative sampling: accept a draft token with probability min(1, target/draft), else draw from the residual. L1.

Leviathan, Kalman, Matias 2023 (2211.17192) algorithm 1 and, the same rule, Chen et al. 2023 (2302.01318) algorithm 2.
The rule is a set of independent coins and a deterministic way to read them, so that a test can enumerate it exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.accept import _chain
from specjax.rng import ACCEPT, RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict


def coins(draft: Draft, target_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two masses of each node: it is kept iff ``u * draft_mass < target_mass``. Both f32[B,N]."""

    def gather(probs: jax.Array) -> jax.Array:
        return jnp.take_along_axis(probs, draft.tokens[..., None], axis=-1)[..., 0]

    target_mass = gather(target_probs[:, :-1])
    return target_mass, jnp.ones_like(target_mass) if draft.probs is None else gather(draft.probs)


def resolve(kept: jax.Array, draft: Draft, target_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads the coins ``kept`` bool[B,N]: how many tokens stand (i32[B]), and the law of the next one (f32[B,V]).

    The law is the target's after a full chain, otherwise the residual max(target - draft, 0), not normalised. A
    deterministic draft is the one-hot law of its token. A residual lost to rounding falls back to the target's law.
    """
    exists = _chain.nodes(draft)
    accepted = _chain.first_failure(kept & exists)
    law = jnp.take_along_axis(target_probs, accepted[:, None, None], axis=1)[:, 0]
    nodes = draft.tokens.shape[1]
    if nodes == 0:
        return accepted, law
    at = jnp.minimum(accepted, nodes - 1)[:, None]
    rejected = (accepted < nodes) & jnp.take_along_axis(exists, at, axis=1)[:, 0]
    if draft.probs is None:
        token = jnp.take_along_axis(draft.tokens, at, axis=1)
        residual = jnp.where(jnp.arange(law.shape[-1]) == token, 0, law)
    else:
        residual = jnp.maximum(law - jnp.take_along_axis(draft.probs, at[..., None], axis=1)[:, 0], 0)
    left = residual.sum(-1) > 0
    return accepted, jnp.where((rejected & left)[:, None], residual, law)


def chain(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft`` N nodes, ``target_probs`` f32[B,N+1,V]; any number of nodes may be invalid. L1."""
    target_mass, draft_mass = coins(draft, target_probs)
    uniform = jax.vmap(lambda k: jax.random.uniform(k, target_mass.shape[1:], target_mass.dtype))
    kept = uniform(keys.at_round(ACCEPT)) * draft_mass < target_mass
    accepted, law = resolve(kept, draft, target_probs)
    return _chain.verdict(draft, accepted, sampling.draw_rows(keys.at_round(RESIDUAL), law))


def make() -> Accept:
    """Speculative sampling on chains."""
    return Accept(chain, _chain.match, "chain", "L1")
