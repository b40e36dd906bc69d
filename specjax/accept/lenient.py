"""Lenience: speculative sampling with scaled-down draft probabilities, to accept more. L3, lossy.

Leviathan et al. 2023 (2211.17192), appendix A.5. A token is accepted with probability
min(1, target / (lenience * upper * draft)). No token is emitted with more than
1 / (lenience * upper) times its target probability. There is no lower bound: diversity is lost.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from specjax import checks, sampling
from specjax.accept import _verdict
from specjax.accept.chain import leftover, masses
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict

REFERENCE = "leviathan2023fast"


def make(*, lenience: float = 1.0, upper: float = 1.0) -> Accept:
    """Lenient speculative sampling on chains.

    Args:
        lenience: in (0, 1], the factor on the draft's probabilities, in the test and in the
            residual max(target - lenience * draft, 0). At temperature 0 a token is accepted if its
            probability (at temperature 1) is at least ``lenience`` times the best.
        upper: in (0, 1], the paper's other form: the uniform number is drawn from [0, upper], and
            the residual does not change.

    Raises:
        UserError: a value out of range.
    """
    for name, value in (("lenience", lenience), ("upper", upper)):
        checks.number(name, value, "in (0, 1] (1 = off)", lambda x: 0 < x <= 1)

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        exists = _verdict.chain_nodes(draft)
        target_mass, draft_mass = masses(draft, target_probs)
        coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
        kept = coins.flip(target_mass, lenience * upper * draft_mass)
        accepted = _verdict.first_failure(kept & exists)
        weights = leftover(accepted, draft, target_probs, lenience)
        return _verdict.prefix(draft, accepted, keys.draw(RESIDUAL, weights))

    def greedy(draft: Draft, logits: jax.Array) -> Verdict:
        _verdict.chain_nodes(draft)
        tokens = jnp.clip(draft.tokens, 0, logits.shape[-1] - 1)
        own = jnp.take_along_axis(logits[:, :-1], tokens[..., None], -1)[..., 0]
        passed = own >= logits[:, :-1].max(-1) + math.log(lenience * upper)
        # Without lenience only the argmax is accepted, no token that ties with it.
        if lenience * upper == 1:
            passed &= draft.tokens == sampling.argmax(logits[:, :-1])
        path, end = _verdict.deepest(draft, passed)
        return _verdict.along(draft, path, sampling.argmax(_verdict.at(logits, end)))

    return Accept(sampled, greedy, "lenient", "L3")
