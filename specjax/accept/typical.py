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

from specjax import declare
from specjax.accept import verdict
from specjax.declare import key
from specjax.errors import UserError
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict

REFERENCE = "cai2024medusa"


def threshold(probs: jax.Array, epsilon: float, delta: float) -> jax.Array:
    """f[...]: min(epsilon, delta * exp(-H)) of probs f[...,V]; entropy H in nats, 0 log 0 = 0."""
    entropy = -jnp.where(probs > 0, probs * jnp.log(jnp.where(probs > 0, probs, 1)), 0).sum(-1)
    return jnp.minimum(epsilon, delta * jnp.exp(-entropy))


EPSILON = 0.09


class Keys(declare.Keys):
    """The keys of ``typical``."""

    epsilon: float | None = key(
        None,
        "a token with a higher probability always passes. It must be below ``delta``, "
        "which the threshold never exceeds. None: 0.09, or no limit where ``delta`` is not above "
        "that.",
        above=0,
        below=1,
    )
    delta: float = key(
        0.3, "the factor on exp(-entropy); the paper takes about sqrt(epsilon)", above=0
    )

    def check(self) -> None:
        if self.epsilon is not None and self.epsilon >= self.delta:
            raise UserError(
                f"epsilon is {self.epsilon} and delta {self.delta}: the threshold is never above "
                "delta, so epsilon has no effect; make it smaller than delta, or leave it out"
            )


@declare.method(Keys)
def make(own: Keys) -> Accept:
    """Typical acceptance, in any topology.

    Raises:
        UserError: a value out of range, or an epsilon that is not below delta.
    """
    limit = EPSILON if own.epsilon is None else own.epsilon

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        before = verdict.before(draft, target_probs)
        mass = verdict.of_tokens(draft, before)
        passed = mass > threshold(before, limit, own.delta)
        score = jnp.log(jnp.maximum(mass, jnp.finfo(mass.dtype).tiny))
        path, end = verdict.deepest(draft, passed, score)
        return verdict.along(draft, path, keys.draw(RESIDUAL, verdict.at(target_probs, end)))

    def law(target_probs: jax.Array, draft_probs: jax.Array, depth: jax.Array) -> jax.Array:
        passed = target_probs > threshold(target_probs, limit, own.delta)[..., None]
        return verdict.law_of_test(draft_probs, passed, target_probs)

    return Accept(sampled, verdict.greedy, "typical", "L3", SIBLINGS, law=law)
