"""Lenience: speculative sampling that compares with a smaller draft law, and so accepts more. L3, lossy by design.

Leviathan et al. 2023 (2211.17192), appendix A.5. A token is kept with probability min(1, target / (lenience * upper * draft)).
No token is emitted with more than 1 / (lenience * upper) times its probability; there is no lower bound: diversity is lost.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.accept import _verdict
from specjax.accept.chain import leftover, masses
from specjax.errors import UserError
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict


def make(*, lenience: float = 1.0, upper: float = 1.0) -> Accept:
    """Lenient speculative sampling on chains.

    Args:
        lenience: in (0, 1], the factor on the draft's law, in the test and in the residual max(target - lenience * draft, 0).
            At temperature 0 a token stands if its probability (at temperature 1) is at least ``lenience`` times the best.
        upper: in (0, 1], the other spelling: the uniform number comes from [0, upper] and the residual is left as it is.

    Raises:
        UserError: a value out of range.
    """
    for name, value in (("lenience", lenience), ("upper", upper)):
        if not 0 < value <= 1:
            raise UserError(f"{name} is {value}; it must be in (0, 1] (1 = off)")

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        exists = _verdict.chain_nodes(draft)
        target_mass, draft_mass = masses(draft, target_probs)
        kept = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(
            target_mass, lenience * upper * draft_mass
        )
        accepted = _verdict.first_failure(kept & exists)
        law = leftover(accepted, draft, target_probs, lenience)
        return _verdict.prefix(draft, accepted, keys.draw(RESIDUAL, law))

    def greedy(draft: Draft, logits: jax.Array) -> Verdict:
        _verdict.chain_nodes(draft)
        tokens = jnp.clip(draft.tokens, 0, logits.shape[-1] - 1)
        own = jnp.take_along_axis(logits[:, :-1], tokens[..., None], -1)[..., 0]
        passed = own >= logits[:, :-1].max(-1) + math.log(lenience * upper)
        if lenience * upper == 1:  # ties stand in no lossless rule
            passed &= draft.tokens == sampling.argmax(logits[:, :-1])
        path, end = _verdict.deepest(draft, passed)
        return _verdict.along(draft, path, sampling.argmax(_verdict.at(logits, end)))

    return Accept(sampled, greedy, "lenient", "L3")
