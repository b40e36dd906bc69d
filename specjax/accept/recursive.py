"""Recursive rejection sampling on trees: each child is tested against the remaining residual. L1.

A child is accepted with probability min(1, target/draft). When it is rejected, its draft
probabilities are subtracted from the target's, and the next child is tested against this residual.
The draft probabilities are given by ``Draft.probs``, so this is one rule for several methods:

- siblings drawn independently from one distribution or from several: multi-step speculative
  sampling, SpecInfer (Miao et al. 2024, 2305.09781, section 4.3). Equal siblings are separate
  trials: the second subtraction matters.
- siblings drawn without replacement: Sequoia (Chen et al. 2024, 2402.12374, algorithm 1) and
  recursive speculative decoding (Jeon et al. 2024, 2402.14160, section 3.2).
- deterministic siblings: one-hot, as in EAGLE-2 (Li et al. 2024, 2406.16858). See
  ``deterministic``.
- a chain: speculative sampling, as in ``chain``.

The order of the trials must not depend on the drawn tokens: it is the order of the nodes. SpecInfer
draws it at random instead. For siblings of one model that makes no difference; of several models
the first is tried first here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.accept import verdict
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import UNCOUPLED, Accept, Draft, Verdict

REFERENCE = ("miao2024specinfer", "chen2024sequoia", "jeon2024recursive")


def residual(target: jax.Array, draft: jax.Array) -> jax.Array:
    """max(target - draft, 0), normalised: f[...,V]. The target's probs where it is 0 everywhere."""
    rest = jnp.maximum(target - draft, 0)
    total = rest.sum(-1, keepdims=True)
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), target)


def recursive(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft``: N nodes, any topology; ``target_probs`` f32[B,N+1,V].

    One trial per turn of the loop.
    """
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    vocab = target_probs.shape[-1]

    def trial(walk: verdict.Walk) -> verdict.Walk:
        node, trying = jnp.argmax(walk.open, -1), walk.open.any(-1)
        probs = verdict.draft_probs_at(draft, node, vocab, target_probs.dtype)
        token = jnp.clip(verdict.at(draft.tokens, node), 0, vocab - 1)
        kept, total = verdict.at(walk.probs, token), verdict.at(probs, token)
        accepted = coins.flip(jnp.where(trying, kept, 0), jnp.where(trying, total, 0), node)
        here = jnp.arange(walk.open.shape[1]) == node[:, None]
        rest = residual(walk.probs, probs)
        rejected = (trying & ~accepted)[:, None]
        walk = walk.replace(open=walk.open & ~here, probs=jnp.where(rejected, rest, walk.probs))
        return verdict.descend(walk, draft, target_probs, node, accepted)

    walk = verdict.walk_down(draft, target_probs, trial)
    return verdict.along(draft, walk.path, keys.draw(RESIDUAL, walk.probs))


def make() -> Accept:
    """Recursive rejection sampling, for every kind of siblings."""
    return Accept(recursive, verdict.greedy, "recursive", "L1", UNCOUPLED)
