"""Lenience: speculative sampling with scaled-down draft probabilities, to accept more. L3, lossy.

Leviathan et al. 2023 (2211.17192), appendix A.5. A token is accepted with probability
min(1, target / (lenience * upper * draft)). No token is emitted with more than
1 / (lenience * upper) times its target probability. There is no lower bound: diversity is lost.
``make_sampling(..., lenience=)`` gives each row its own value, in one program; a row with 1 has the
target's law.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from specjax import declare, sampling
from specjax.accept import verdict
from specjax.accept.verdict import leftover, masses
from specjax.declare import key
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict

REFERENCE = "leviathan2023fast"


class Keys(declare.Keys):
    """The keys of ``lenient``."""

    lenience: float = key(
        1.0,
        "the factor on the draft's probabilities, in the test and in the residual "
        "max(target - lenience * draft, 0). At temperature 0 a token is accepted if its "
        "probability (at temperature 1) is at least ``lenience`` times the best.",
        above=0,
        most=1,
    )
    upper: float = key(
        1.0,
        "the paper's other form: the uniform number is drawn from [0, upper], and the "
        "residual does not change",
        above=0,
        most=1,
    )


@declare.method(Keys)
def make(own: Keys) -> Accept:
    """Lenient speculative sampling on chains.

    Raises:
        UserError: a value out of range.
    """
    return _rule(own.lenience, own.upper)


def _rule(lenience: float | jax.Array, upper: float) -> Accept:
    """The rule with one lenience for all rows, or one for each: f32[B]."""
    by_row = isinstance(lenience, jax.Array)
    scale = lenience[:, None] if by_row else lenience

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        target_mass, draft_mass = masses(draft, target_probs)
        accepted = verdict.in_order(keys, draft, target_mass, scale * upper * draft_mass)
        weights = leftover(accepted, draft, target_probs, scale)
        return verdict.prefix(draft, accepted, keys.draw(RESIDUAL, weights))

    def greedy(draft: Draft, logits: jax.Array) -> Verdict:
        verdict.chain_nodes(draft)
        logit = verdict.of_tokens(draft, logits[:, :-1])
        share = scale * upper
        log = jnp.log(share) if by_row else math.log(share)
        passed = logit >= logits[:, :-1].max(-1) + log
        # Without lenience only the argmax is accepted, no token that ties with it.
        if by_row or share == 1:
            passed &= (share != 1) | (draft.tokens == sampling.argmax(logits[:, :-1]))
        path, end = verdict.deepest(draft, passed)
        return verdict.along(draft, path, sampling.argmax(verdict.at(logits, end)))

    def law(target_probs: jax.Array, draft_probs: jax.Array, depth: jax.Array) -> jax.Array:
        taken = lenience * upper * draft_probs
        kept = jnp.minimum(1, target_probs / jnp.where(taken > 0, taken, 1))
        left = jnp.maximum(target_probs - lenience * draft_probs, 0)
        left = jnp.where(left.sum(-1, keepdims=True) > 0, left, target_probs)
        return verdict.law_of_test(draft_probs, kept, left)

    of_rows = functools.partial(_rule, upper=upper)
    # The rows of a law are places of texts: they have no value of their own.
    return Accept(sampled, greedy, "lenient", "L3", of_rows=of_rows, law=None if by_row else law)
