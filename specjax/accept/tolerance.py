"""Tolerance: accept a draft token that is close enough to the target's best. L3, lossy.

Blockwise parallel decoding (Stern et al. 2018, 1811.03115), section 5: a token among the target's
``top`` tokens, or (tokens that are numbers, such as pixels) within ``distance`` of its best; the
first ``least`` tokens are always accepted. SpecDec (Xia et al. 2023, 2203.16487), section 3.3: a
token among the ``top`` and at most ``gap`` below the best. The longest path of such tokens is
accepted, then one token of the target is emitted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import checks, sampling
from specjax.accept import _verdict, _walk
from specjax.errors import UserError
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict

REFERENCE = ("stern2018blockwise", "xia2023speculative")


class Bounds(NamedTuple):
    """The keys of ``make``."""

    top: int
    gap: float
    distance: int
    least: int


def accepted_path(draft: Draft, scores: jax.Array, bounds: Bounds) -> tuple[jax.Array, jax.Array]:
    """The longest path within the bounds i32[B,M], and the index i32[B] of its end in the output.

    ``scores`` f[B,N+1,V] are the target's log-probabilities or logits.
    """
    before = _walk.before(draft, scores)
    tokens = jnp.clip(draft.tokens, 0, scores.shape[-1] - 1)
    own = jnp.take_along_axis(before, tokens[..., None], -1)
    best = sampling.argmax(before)
    # Of equal scores the lower id is the better one, as in ``sampling.argmax``.
    ids = jnp.arange(scores.shape[-1])
    better = ((before > own) | ((before == own) & (ids < tokens[..., None]))).sum(-1)
    passed = (better < bounds.top) & (before.max(-1) - own[..., 0] <= bounds.gap)
    if bounds.distance:
        passed |= jnp.abs(draft.tokens - best) <= bounds.distance
    if bounds.least:
        passed |= _walk.depths(draft) <= bounds.least
    # A token that the settings exclude (a ban, a cut-off) is never emitted.
    passed &= own[..., 0] > -jnp.inf
    score = jax.nn.log_softmax(before, -1)
    score = jnp.take_along_axis(score, tokens[..., None], -1)[..., 0]
    # Finite for a token of probability 0 too, so that the sum along a path is finite.
    score = jnp.maximum(score, jnp.finfo(score.dtype).min / 1024)
    return _verdict.deepest(draft, passed, score)


def make(*, top: int = 1, gap: float | None = None, distance: int = 0, least: int = 0) -> Accept:
    """Tolerant acceptance, in any topology. The defaults are greedy matching.

    Args:
        top: a token is accepted if fewer than ``top`` tokens are more probable (kappa of BPD, beta
            of SpecDec; 3 to 5),
        gap: and if its log-probability is at most this much, in nats, below the best one's (tau of
            SpecDec; 1 to 3). Sampled rows have the probabilities after temperature and cut-offs.
            None: no limit. Only with ``top`` above 1: the best token has no gap;
        distance: or, if positive, if its id differs by at most this much from the best one's
            (epsilon of BPD);
        least: or if it is among the first ``least`` tokens (the minimum block size of BPD). In no
            case if the sampling settings exclude it.

    Raises:
        UserError: a value out of range, or a gap with ``top`` 1.
    """
    for name, value, lowest in (("top", top, 1), ("distance", distance, 0), ("least", least, 0)):
        checks.whole(name, value, lowest)
    if gap is not None:
        checks.number("gap", gap, "of at least 0", lambda x: x >= 0)
    if gap is not None and top == 1:
        raise UserError(
            f"gap is {gap} and top 1: only the best token passes, and it has no gap; "
            "raise top, or leave gap out"
        )
    bounds = Bounds(top, math.inf if gap is None else gap, distance, least)

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        path, end = accepted_path(draft, jnp.log(target_probs), bounds)
        return _verdict.along(draft, path, keys.draw(RESIDUAL, _verdict.at(target_probs, end)))

    def greedy(draft: Draft, logits: jax.Array) -> Verdict:
        path, end = accepted_path(draft, logits, bounds)
        return _verdict.along(draft, path, sampling.argmax(_verdict.at(logits, end)))

    return Accept(sampled, greedy, "tolerance", "L3", SIBLINGS)
