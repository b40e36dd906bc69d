"""Typical acceptance: keep what the target finds plausible enough, correct nothing. L3, lossy by design.

Medusa (Cai et al. 2024, 2401.10774), section 2.3.1: a token stands if target > min(epsilon, delta * exp(-entropy)), at the
sampling temperature, and the longest path of such tokens is kept. After it one token of the target's own. At temperature 0
only the argmax stands.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.accept import _verdict, _walk
from specjax.errors import UserError
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict


def threshold(law: jax.Array, epsilon: float, delta: float) -> jax.Array:
    """f[...]: min(epsilon, delta * exp(-H)) of laws f[...,V]; entropy in nats, 0 log 0 = 0."""
    entropy = -jnp.where(law > 0, law * jnp.log(jnp.where(law > 0, law, 1)), 0).sum(-1)
    return jnp.minimum(epsilon, delta * jnp.exp(-entropy))


def make(*, epsilon: float = 0.09, delta: float = 0.3) -> Accept:
    """Typical acceptance, in any topology.

    Args:
        epsilon: in (0, 1): a probability above it always stands.
        delta: above 0: the factor on exp(-entropy); the paper takes about sqrt(epsilon).

    Raises:
        UserError: a value out of range.
    """
    if not 0 < epsilon < 1:
        raise UserError(f"epsilon is {epsilon}; it must be in (0, 1)")
    if not delta > 0:
        raise UserError(f"delta is {delta}; it must be above 0")

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        before = _walk.before(draft, target_probs)
        tokens = jnp.clip(draft.tokens, 0, target_probs.shape[-1] - 1)
        mass = jnp.take_along_axis(before, tokens[..., None], -1)[..., 0]
        passed = mass > threshold(before, epsilon, delta)
        path, end = _verdict.deepest(
            draft, passed, jnp.log(jnp.maximum(mass, jnp.finfo(mass.dtype).tiny))
        )
        return _verdict.along(draft, path, keys.draw(RESIDUAL, _verdict.at(target_probs, end)))

    return Accept(sampled, _verdict.greedy, "typical", "L3", SIBLINGS)
