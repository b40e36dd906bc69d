"""K-SEQ: k i.i.d. candidates per position, each accepted with min(1, target / (rho * draft)). L1.

SpecTr (Sun et al. 2023, 2310.15141), algorithm 2: the first of k draws from one distribution that
passes is accepted, else a residual is drawn. rho >= 1 is the smallest for which that residual is
nowhere negative. The acceptance is then within a factor 1 - 1/e of the best possible for any rule
on k draws (``theory.best_acceptance`` is the best).

On a tree, k counts the candidates that continue the accepted prefix: the children of all nodes with
the same tokens along their paths.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.accept import verdict
from specjax.rng import RESIDUAL, Coins, RowKeys
from specjax.types import CHAIN, IID, Accept, Draft, Verdict

REFERENCE = "sun2023spectr"

# Halvings of the interval [1, k]. The upper end is valid after each; more of them only gain
# acceptance.
HALVINGS = 30


def overlap(rho: jax.Array, target: jax.Array, draft: jax.Array) -> jax.Array:
    """f[B]: sum min(draft, target / rho), the chance that one candidate passes."""
    return jnp.minimum(draft, target / rho[:, None]).sum(-1)


def any_passes(beta: jax.Array, count: jax.Array) -> jax.Array:
    """f[B]: 1 - (1 - beta)^count, the chance that one of ``count`` candidates passes."""
    return -jnp.expm1(count * jnp.log1p(-jnp.minimum(beta, 1)))


def solve(count: jax.Array, target: jax.Array, draft: jax.Array) -> jax.Array:
    """rho f[B] for ``count`` i32[B] candidates, ``target`` and ``draft`` f[B,V].

    The smallest with 1 - (1 - overlap)^count <= rho * overlap, rounded up.
    """
    dtype = target.dtype
    count = jnp.maximum(count, 1).astype(dtype)

    def valid(rho):
        beta = overlap(rho, target, draft)
        return any_passes(beta, count) <= rho * beta

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        good = valid(middle)
        return jnp.where(good, low, middle), jnp.where(good, middle, high)

    _, high = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.ones_like(count), count))
    return high * (1 + 4 * jnp.finfo(dtype).eps)


def residual(count: jax.Array, rho: jax.Array, target: jax.Array, draft: jax.Array) -> jax.Array:
    """f[B,V]: target - (acceptance / overlap) * min(draft, target / rho), not normalised.

    Where that is 0 everywhere, the target's probs.
    """
    beta = overlap(rho, target, draft)
    passes = any_passes(beta, count.astype(beta.dtype))
    times = jnp.where(beta > 0, passes / jnp.where(beta > 0, beta, 1), 0)
    rest = jnp.maximum(target - times[:, None] * jnp.minimum(draft, target / rho[:, None]), 0)
    return jnp.where(rest.sum(-1, keepdims=True) > 0, rest, target)


class Candidates(NamedTuple):
    """The open nodes of a walk."""

    number: jax.Array  # i32[B]
    exist: jax.Array  # bool[B] whether number > 0
    probs: jax.Array  # f[B,V] the distribution that they were drawn from; 0 for no candidate


def candidates(walk: verdict.Walk, draft: Draft) -> Candidates:
    """The candidates for the next token."""
    count, trying = walk.open.sum(-1), walk.open.any(-1)
    node, (_, vocab) = jnp.argmax(walk.open, -1), walk.probs.shape
    probs = verdict.draft_probs_at(draft, node, vocab, walk.probs.dtype)
    return Candidates(count, trying, jnp.where(trying[:, None], probs, 0))


def try_all(
    walk: verdict.Walk,
    draft: Draft,
    target_probs: jax.Array,
    some: Candidates,
    rho: jax.Array,
    coins: Coins,
) -> verdict.Walk:
    """Tests all candidates; descends to the first that passes, or keeps the residual."""
    tokens = jnp.clip(draft.tokens, 0, target_probs.shape[-1] - 1)
    kept = jnp.where(walk.open, jnp.take_along_axis(walk.probs, tokens, 1), 0)
    drawn = jnp.take_along_axis(some.probs, tokens, 1)
    # A coin belongs to a node and a node is open at one level only: each coin is used once.
    passed = coins.flip(kept, jnp.where(walk.open, rho[:, None] * drawn, 0))
    rest = residual(some.number, rho, walk.probs, some.probs)
    stays = some.exist & ~passed.any(-1)
    walk = walk.replace(
        open=walk.open & ~stays[:, None], probs=jnp.where(stays[:, None], rest, walk.probs)
    )
    return verdict.descend(walk, draft, target_probs, jnp.argmax(passed, -1), passed.any(-1))


def k_seq(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft``: N nodes, siblings i.i.d.; ``target_probs`` f32[B,N+1,V]."""
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)

    def level(walk: verdict.Walk) -> verdict.Walk:
        some = candidates(walk, draft)
        rho = solve(some.number, walk.probs, some.probs)
        return try_all(walk, draft, target_probs, some, rho, coins)

    walk = verdict.walk_down(draft, target_probs, level)
    return verdict.along(draft, walk.path, keys.draw(RESIDUAL, walk.probs))


def make() -> Accept:
    """K-SEQ, for chains and trees of independent siblings."""
    return Accept(k_seq, verdict.greedy, "k_seq", "L1", (CHAIN, IID))
