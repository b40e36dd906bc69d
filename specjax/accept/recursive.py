"""Recursive rejection sampling on trees: try the children of a node one by one, each against what is left of the target. L1.

A child is kept with probability min(1, target/draft); when it falls, its draft law is taken off the target's, and the next
child faces the residual. Which law that is, the draft says (``Draft.probs``), and that makes it several published rules:

- siblings drawn independently from one law or from several: multi-step speculative sampling, SpecInfer (Miao et al. 2024,
  2305.09781, section 4.3). Equal siblings stay separate trials: their second subtraction matters.
- siblings drawn without replacement: Sequoia (Chen et al. 2024, 2402.12374, algorithm 1) and recursive speculative decoding
  (Jeon et al. 2024, 2402.14160, section 3.2).
- deterministic siblings: their laws are one-hot, as in EAGLE-2 (Li et al. 2024, 2406.16858). See ``deterministic``.
- a chain: speculative sampling, as in ``chain``.

The order of the trials must not depend on the tokens drawn: it is the order of the nodes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.accept import _verdict, _walk
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict


def recursive(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft`` N nodes in any topology, ``target_probs`` f32[B,N+1,V]. L1. One trial per turn of the loop."""
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    vocab = target_probs.shape[-1]

    def trial(walk: _walk.Walk) -> _walk.Walk:
        node, trying = jnp.argmax(walk.open, -1), walk.open.any(-1)
        law = _verdict.law_of(draft, node, vocab, target_probs.dtype)
        token = _verdict.at(draft.tokens, node)
        clipped = jnp.clip(token, 0, vocab - 1)
        kept, total = _verdict.at(walk.probs, clipped), _verdict.at(law, clipped)
        accepted = coins.flip(jnp.where(trying, kept, 0), jnp.where(trying, total, 0), node)
        here = jnp.arange(walk.open.shape[1]) == node[:, None]
        rest = residual(walk.probs, law)
        walk = walk.replace(
            open=walk.open & ~here, probs=jnp.where((trying & ~accepted)[:, None], rest, walk.probs)
        )
        return _walk.descend(walk, draft, target_probs, node, accepted)

    if draft.tokens.shape[1] == 0:
        walk = _walk.begin(draft, target_probs)
    else:
        walk = jax.lax.while_loop(lambda w: w.open.any(), trial, _walk.begin(draft, target_probs))
    return _verdict.along(draft, walk.path, keys.draw(RESIDUAL, walk.probs))


def residual(law: jax.Array, draft: jax.Array) -> jax.Array:
    """max(law - draft, 0), normalised: f[...,V]. A residual lost to rounding leaves the law as it was."""
    rest = jnp.maximum(law - draft, 0)
    total = rest.sum(-1, keepdims=True)
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), law)


def make() -> Accept:
    """Recursive rejection sampling, for every kind of siblings."""
    return Accept(recursive, _verdict.greedy, "recursive", "L1", SIBLINGS)
