"""Sample-then-match: the target's own sampler draws a token; an equal draft token is accepted. L1.

Only token ids are compared, so any draft is valid, chain or tree, and its probabilities are not
read. On a tree it is the naive sampling of SpecInfer (Miao et al. 2024, 2305.09781). It accepts
less: sum(target * draft) instead of sum(min(target, draft)). The sampler's noise is keyed by
absolute position. With equal logits the output is therefore bit for bit that of plain decoding
with the same keys, which makes this rule the strongest regression test.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.accept import verdict
from specjax.rng import RowKeys
from specjax.types import UNCOUPLED, Accept, Draft, Verdict

REFERENCE = "miao2024specinfer"


def match(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``target_probs`` f32[B,N+1,V]. The drawn token is emitted at a mismatch too."""
    return with_draws(keys.draw_at, draft, target_probs)


def with_draws(
    draw: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    draft: Draft,
    target_probs: jax.Array,
) -> Verdict:
    """The rule with tokens i32[B] of ``draw(depth i32[], probs f[B,V], active bool[B])``."""
    batch = draft.tokens.shape[0]
    first = draw(jnp.zeros((), jnp.int32), target_probs[:, 0], jnp.ones((batch,), bool))
    if draft.tokens.shape[1] == 0:
        return verdict.along(draft, jnp.zeros((batch, 0), jnp.int32), first)

    def hits(walk: verdict.Walk, token: jax.Array) -> jax.Array:
        return walk.open & (draft.tokens == token[:, None])

    def level(carry):
        walk, token, depth = carry
        hit = hits(walk, token)
        matched = hit.any(-1)
        walk = verdict.descend(walk, draft, target_probs, jnp.argmax(hit, -1), matched)
        depth = depth + 1
        return walk, jnp.where(matched, draw(depth, walk.probs, matched), token), depth

    start = (verdict.begin_walk(draft, target_probs), first, jnp.zeros((), jnp.int32))
    walk, token, _ = jax.lax.while_loop(lambda carry: hits(*carry[:2]).any(), level, start)
    return verdict.along(draft, walk.path, token)


def make() -> Accept:
    """Sample-then-match, in any topology."""
    return Accept(match, verdict.greedy, "match", "L1", UNCOUPLED)
