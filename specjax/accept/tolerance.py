"""Tolerance: keep a draft token that is close enough to the target's best. L3, lossy by design.

Blockwise parallel decoding (Stern et al. 2018, 1811.03115), section 5: among the target's ``top`` tokens, or (tokens that are
numbers, such as pixels) within ``distance`` of its best, with a ``least`` number accepted whatever they are. SpecDec (Xia et
al. 2023, 2203.16487), section 3.3: among the ``top`` and at most ``gap`` below the best. The longest path of such tokens is
kept, then one token of the target's own.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.accept import _verdict, _walk
from specjax.errors import UserError
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict


def make(*, top: int = 1, gap: float = math.inf, distance: int = 0, least: int = 0) -> Accept:
    """Tolerant acceptance, in any topology. The defaults are greedy matching.

    Args:
        top: a token stands if fewer than ``top`` tokens are more probable (kappa of BPD, beta of SpecDec; 3 to 5).
        gap: and if its log-probability is at most this far, in nats, below the best one's (tau of SpecDec; 1 to 3).
        distance: or, if positive, if its id is at most this far from the best one's (epsilon of BPD).
        least: draft tokens that stand without being looked at (the minimum block size of BPD).

    Raises:
        UserError: a value out of range.
    """
    for name, value, low in (("top", top, 1), ("distance", distance, 0), ("least", least, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise UserError(f"{name} is {value}; it must be at least {low}, and whole")
    if not gap >= 0:
        raise UserError(f"gap is {gap}; it must be at least 0")

    def keep(draft: Draft, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """scores f[B,N+1,V], log-probabilities or logits -> the path that is kept and the target's row after it."""
        before = _walk.before(draft, scores)
        tokens = jnp.clip(draft.tokens, 0, scores.shape[-1] - 1)
        own = jnp.take_along_axis(before, tokens[..., None], -1)
        best = sampling.argmax(before)
        # Of equal scores the lower id is the better one, as everywhere.
        ids = jnp.arange(scores.shape[-1])
        better = ((before > own) | ((before == own) & (ids < tokens[..., None]))).sum(-1)
        passed = (better < top) & (before.max(-1) - own[..., 0] <= gap)
        if distance:
            passed |= jnp.abs(draft.tokens - best) <= distance
        if least:
            passed |= _walk.depths(draft) <= least
        score = jax.nn.log_softmax(before, -1)
        score = jnp.take_along_axis(score, tokens[..., None], -1)[..., 0]
        return _verdict.deepest(
            draft, passed, jnp.maximum(score, jnp.finfo(score.dtype).min / 1024)
        )

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        path, end = keep(draft, jnp.log(target_probs))
        return _verdict.along(draft, path, keys.draw(RESIDUAL, _verdict.at(target_probs, end)))

    def greedy(draft: Draft, logits: jax.Array) -> Verdict:
        path, end = keep(draft, logits)
        return _verdict.along(draft, path, sampling.argmax(_verdict.at(logits, end)))

    return Accept(sampled, greedy, "tolerance", "L3", SIBLINGS)
