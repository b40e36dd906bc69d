"""Typical acceptance: accept tokens that are plausible under the target. L3, lossy.

Medusa (Cai et al. 2024, 2401.10774), section 2.3.1: a token passes if
target > min(epsilon, delta * exp(-entropy)), at the sampling temperature. The longest path of such
tokens is accepted, then one token of the target is emitted. At temperature 0 only the argmax
passes. The distribution of the accepted tokens is not corrected.

Here the token after the path is drawn from the target's distribution after it. The paper takes the
most probable token there, and so does the released code by default; its other mode draws from the
tokens above the same threshold.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import checks
from specjax.accept import _verdict, _walk
from specjax.errors import UserError
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict

REFERENCE = "cai2024medusa"


def threshold(probs: jax.Array, epsilon: float, delta: float) -> jax.Array:
    """f[...]: min(epsilon, delta * exp(-H)) of probs f[...,V]; entropy H in nats, 0 log 0 = 0."""
    entropy = -jnp.where(probs > 0, probs * jnp.log(jnp.where(probs > 0, probs, 1)), 0).sum(-1)
    return jnp.minimum(epsilon, delta * jnp.exp(-entropy))


EPSILON = 0.09


def make(*, epsilon: float | None = None, delta: float = 0.3) -> Accept:
    """Typical acceptance, in any topology.

    Args:
        epsilon: in (0, 1): a token with a higher probability always passes. It must be below
            ``delta``, which the threshold never exceeds. None: 0.09, or no limit where ``delta`` is
            not above that.
        delta: above 0: the factor on exp(-entropy); the paper takes about sqrt(epsilon).

    Raises:
        UserError: a value out of range, or an epsilon that is not below delta.
    """
    if not delta > 0:
        raise UserError(f"delta is {delta}; it must be above 0")
    if epsilon is not None:
        checks.number("epsilon", epsilon, "in (0, 1)", lambda x: 0 < x < 1)
        if epsilon >= delta:
            raise UserError(
                f"epsilon is {epsilon} and delta {delta}: the threshold is never above delta, so "
                "epsilon has no effect; make it smaller than delta, or leave it out"
            )
    limit = EPSILON if epsilon is None else epsilon

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        before = _walk.before(draft, target_probs)
        tokens = jnp.clip(draft.tokens, 0, target_probs.shape[-1] - 1)
        mass = jnp.take_along_axis(before, tokens[..., None], -1)[..., 0]
        passed = mass > threshold(before, limit, delta)
        score = jnp.log(jnp.maximum(mass, jnp.finfo(mass.dtype).tiny))
        path, end = _verdict.deepest(draft, passed, score)
        return _verdict.along(draft, path, keys.draw(RESIDUAL, _verdict.at(target_probs, end)))

    return Accept(sampled, _verdict.greedy, "typical", "L3", SIBLINGS)
