"""Block verification: every prefix of the chain is tested, the longest to pass is accepted. L1.

Sun et al. 2025 (2403.10444), algorithm 2. In expectation it never accepts fewer tokens than
``chain`` from the same inputs: a likely prefix compensates for an unlikely token after it. A test
that fails does not end the search; only the last success counts. With deterministic drafts it is
equal to the token-wise rule.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.accept import verdict
from specjax.accept.verdict import leftover, masses
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import Accept, Draft, Verdict

REFERENCE = "sun2025block"


def weights(draft: Draft, target_probs: jax.Array) -> jax.Array:
    """f32[B,N+1]: the share of the draft mass of each prefix that can be accepted.

    Entry 0 is 1, entry i is min(1, entry i-1 * target(x_i) / draft(x_i)).
    """
    target_mass, draft_mass = masses(draft, target_probs)
    quotient = target_mass / jnp.where(draft_mass > 0, draft_mass, 1)
    ratio = jnp.where(draft_mass > 0, quotient, target_mass > 0)

    def step(weight, ratio):
        weight = jnp.minimum(1, weight * ratio)
        return weight, weight

    one = jnp.ones(ratio.shape[:1], ratio.dtype)
    return jnp.concatenate([one[:, None], jax.lax.scan(step, one, ratio.T)[1].T], 1)


def chances(
    draft: Draft, target_probs: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The chance that the prefix of i+1 tokens passes its test: numerator and denominator.

    f32[B,N] each. ``weight`` is the result of ``weights``. For the last token the chance is its
    weight. Before it, it is r / (r + 1 - weight), with the residual mass r of the next position.
    """
    count = verdict.first_failure(verdict.chain_nodes(draft))[:, None]
    size, vocab = draft.tokens.shape[1], target_probs.shape[-1]
    if draft.probs is None:
        next_probs = jax.nn.one_hot(draft.tokens, vocab, dtype=target_probs.dtype)
    else:
        next_probs = jnp.where(draft.valid[..., None], draft.probs, 0)
    rest = jnp.maximum(weight[:, 1:-1, None] * target_probs[:, 1:-1] - next_probs[:, 1:], 0).sum(-1)
    # The entry of the last node is not used.
    rest = jnp.pad(rest, ((0, 0), (0, 1)))
    place = jnp.arange(1, size + 1)
    here = weight[:, 1:]
    kept = jnp.where(place == count, here, jnp.where(place < count, rest, 0))
    # 1 - here first: it may be exactly 0 while the residual is small.
    total = jnp.where(place == count, 1, jnp.where(place < count, rest + (1 - here), 0))
    return kept, total


def after(
    accepted: jax.Array, draft: Draft, target_probs: jax.Array, weight: jax.Array
) -> jax.Array:
    """Weights f32[B,V] of the token after the accepted ones: max(weight * target - draft, 0)."""
    scale = verdict.at(weight, accepted)
    return leftover(accepted, draft, target_probs, (1 / jnp.where(scale > 0, scale, 1))[:, None])


def decide(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many tokens of a chain of N > 0 nodes are accepted, and the token after them, i32[B]."""
    size = draft.tokens.shape[1]
    weight = weights(draft, target_probs)
    passed = keys.coins(size, target_probs.dtype).flip(*chances(draft, target_probs, weight))
    accepted = jnp.max(jnp.where(passed, jnp.arange(1, size + 1), 0), -1)
    return accepted, keys.draw(RESIDUAL, after(accepted, draft, target_probs, weight))


def block(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft``: N nodes, any of them may be invalid; ``target_probs`` f32[B,N+1,V]."""
    if draft.tokens.shape[1] == 0:
        zero = jnp.zeros(draft.tokens.shape[:1], jnp.int32)
        return verdict.prefix(draft, zero, keys.draw(RESIDUAL, target_probs[:, 0]))
    return verdict.prefix(draft, *decide(keys, draft, target_probs))


def make() -> Accept:
    """Block verification on chains."""
    return Accept(block, verdict.greedy, "block", "L1", whole_tree=True)
