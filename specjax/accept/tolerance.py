"""Tolerance: accept a draft token that is close enough to the target's best. L3, lossy.

Blockwise parallel decoding (Stern et al. 2018, 1811.03115), section 5: a token among the target's
``top`` tokens, or (tokens that are numbers, such as pixels) within ``distance`` of its best; the
first ``least`` tokens are always accepted. SpecDec (Xia et al. 2023, 2203.16487), section 3.3: a
token among the ``top`` and at most ``gap`` below the best. The longest path of such tokens is
accepted, then one token of the target is emitted.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from specjax import declare, sampling
from specjax.accept import verdict
from specjax.declare import key
from specjax.errors import UserError
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import UNCOUPLED, Accept, Draft, Verdict

REFERENCE = ("stern2018blockwise", "xia2023speculative")


class Keys(declare.Keys):
    """The keys of ``tolerance``."""

    top: int = key(
        1,
        "a token is accepted if fewer than ``top`` tokens are more probable (kappa of BPD, beta "
        "of SpecDec; 3 to 5)",
        least=1,
    )
    gap: float | None = key(
        None,
        "and if its log-probability is at most so many nats below the best one's (tau of SpecDec; "
        "1 to 3). Sampled rows have the probabilities after temperature and cut-offs. "
        "None: no limit. Only with ``top`` above 1: the best token has no gap",
        least=0,
    )
    distance: int = key(
        0,
        "or, if positive, if its id differs by at most this much from the best one's (epsilon of "
        "BPD)",
        least=0,
    )
    least: int = key(
        0,
        "or if it is among the first ``least`` tokens (BPD's minimum block). In no case if "
        "the sampling settings exclude it",
        least=0,
    )

    def check(self) -> None:
        if self.gap is not None and self.top == 1:
            raise UserError(
                f"gap is {self.gap} and top 1: only the best token passes, and it has no gap; "
                "raise top, or leave gap out"
            )


def accepted_path(draft: Draft, scores: jax.Array, bounds: Keys) -> tuple[jax.Array, jax.Array]:
    """The longest path within the bounds i32[B,M], and the index i32[B] of its end in the output.

    ``scores`` f[B,N+1,V] are the target's log-probabilities or logits.
    """
    before = verdict.before(draft, scores)
    tokens = jnp.clip(draft.tokens, 0, scores.shape[-1] - 1)
    own = verdict.of_tokens(draft, before)
    best = sampling.argmax(before)
    # Of equal scores the lower id is the better one, as in ``sampling.argmax``.
    ids = jnp.arange(scores.shape[-1])
    higher, equal = before > own[..., None], before == own[..., None]
    better = (higher | (equal & (ids < tokens[..., None]))).sum(-1)
    gap = math.inf if bounds.gap is None else bounds.gap
    passed = (better < bounds.top) & (before.max(-1) - own <= gap)
    if bounds.distance:
        passed |= jnp.abs(draft.tokens - best) <= bounds.distance
    if bounds.least:
        passed |= verdict.depths(draft) <= bounds.least
    # A token that the settings exclude (a ban, a cut-off) is never emitted.
    passed &= own > -jnp.inf
    score = verdict.of_tokens(draft, jax.nn.log_softmax(before, -1))
    # Finite for a token of probability 0 too, so that the sum along a path is finite.
    score = jnp.maximum(score, jnp.finfo(score.dtype).min / 1024)
    return verdict.deepest(draft, passed, score)


def tolerated(target_probs: jax.Array, depth: jax.Array, bounds: Keys) -> jax.Array:
    """bool[...,V]: every token that is within the bounds at a place, at ``depth`` i32[...]."""
    scores, ids = jnp.log(target_probs), jnp.arange(target_probs.shape[-1])
    rank = jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)
    gap = math.inf if bounds.gap is None else bounds.gap
    passed = (rank < bounds.top) & (scores.max(-1, keepdims=True) - scores <= gap)
    if bounds.distance:
        best = sampling.argmax(scores)[..., None]
        passed |= jnp.abs(ids - best) <= bounds.distance
    passed |= (depth <= bounds.least)[..., None]
    return passed & (target_probs > 0)


@declare.method(Keys)
def make(own: Keys) -> Accept:
    """Tolerant acceptance, in any topology. The defaults are greedy matching.

    Raises:
        UserError: a value out of range, or a gap with ``top`` 1.
    """

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        path, end = accepted_path(draft, jnp.log(target_probs), own)
        return verdict.along(draft, path, keys.draw(RESIDUAL, verdict.at(target_probs, end)))

    def greedy(draft: Draft, logits: jax.Array) -> Verdict:
        path, end = accepted_path(draft, logits, own)
        return verdict.along(draft, path, sampling.argmax(verdict.at(logits, end)))

    def law(target_probs: jax.Array, draft_probs: jax.Array, depth: jax.Array) -> jax.Array:
        return verdict.law_of_test(draft_probs, tolerated(target_probs, depth, own), target_probs)

    return Accept(sampled, greedy, "tolerance", "L3", UNCOUPLED, law=law)
