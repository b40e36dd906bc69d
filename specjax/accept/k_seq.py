"""K-SEQ: k independent candidates for one place, each kept with probability min(1, target / (rho * draft)). L1.

SpecTr (Sun et al. 2023, 2310.15141), algorithm 2: the first of k draws from one law that passes stands, else a residual is
drawn. rho >= 1 is the smallest for which that residual is nowhere negative; the acceptance is then within a factor 1 - 1/e
of the best that any rule on k draws can do (``specjax.testing.transport`` computes the best for tiny vocabularies).

On a tree, k counts the candidates that continue the accepted prefix: of every node that carries the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.accept import _verdict, _walk
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import CHAIN, IID, Accept, Draft, Verdict

HALVINGS = 30  # of the interval [1, k]; the upper end is valid after each, so more of them gain acceptance only


def overlap(rho: jax.Array, target: jax.Array, draft: jax.Array) -> jax.Array:
    """f[B]: sum min(draft, target / rho), the chance that one candidate passes."""
    return jnp.minimum(draft, target / rho[:, None]).sum(-1)


def solve(count: jax.Array, target: jax.Array, draft: jax.Array) -> jax.Array:
    """rho f[B] for ``count`` i32[B] candidates: the smallest with 1 - (1 - overlap)^count <= rho * overlap, rounded up."""
    dtype = target.dtype
    count = jnp.maximum(count, 1).astype(dtype)

    def valid(rho):
        beta = overlap(rho, target, draft)
        return accepted(beta, count) <= rho * beta

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        good = valid(middle)
        return jnp.where(good, low, middle), jnp.where(good, middle, high)

    _, high = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.ones_like(count), count))
    return high * (1 + 4 * jnp.finfo(dtype).eps)


def accepted(beta: jax.Array, count: jax.Array) -> jax.Array:
    """f[B]: 1 - (1 - beta)^count."""
    return -jnp.expm1(count * jnp.log1p(-jnp.minimum(beta, 1)))


def k_seq(
    keys: RowKeys, draft: Draft, target_probs: jax.Array, find: Callable | None = None
) -> Verdict:
    """The rule. ``draft`` N nodes whose siblings are independent draws from one law, ``target_probs`` f32[B,N+1,V]. L1.

    ``find`` gives rho (``solve``); tests put a mistake there.
    """
    find = find or solve
    size, vocab, dtype = draft.tokens.shape[1], target_probs.shape[-1], target_probs.dtype
    if size == 0:
        return _verdict.along(
            draft, jnp.zeros_like(draft.tokens), keys.draw(RESIDUAL, target_probs[:, 0])
        )
    coins = keys.coins(size, dtype)

    def level(walk: _walk.Walk) -> _walk.Walk:
        count, trying = walk.open.sum(-1), walk.open.any(-1)
        law = _verdict.law_of(draft, jnp.argmax(walk.open, -1), vocab, dtype)
        law = jnp.where(trying[:, None], law, 0)
        rho = find(count, walk.probs, law)
        tokens = jnp.clip(draft.tokens, 0, vocab - 1)
        kept = jnp.where(walk.open, jnp.take_along_axis(walk.probs, tokens, 1), 0)
        total = jnp.where(walk.open, rho[:, None] * jnp.take_along_axis(law, tokens, 1), 0)
        # A coin belongs to a node and a node is open at one level only: each is asked once.
        passed = coins.flip(kept, total)
        rest = residual(count, rho, walk.probs, law)
        stays = trying & ~passed.any(-1)
        walk = walk.replace(
            open=walk.open & ~stays[:, None], probs=jnp.where(stays[:, None], rest, walk.probs)
        )
        return _walk.descend(walk, draft, target_probs, jnp.argmax(passed, -1), passed.any(-1))

    walk = jax.lax.while_loop(lambda w: w.open.any(), level, _walk.begin(draft, target_probs))
    return _verdict.along(draft, walk.path, keys.draw(RESIDUAL, walk.probs))


def residual(count: jax.Array, rho: jax.Array, target: jax.Array, draft: jax.Array) -> jax.Array:
    """f[B,V]: target - (acceptance / overlap) * min(draft, target / rho), not normalised; the target's if nothing is left."""
    beta = overlap(rho, target, draft)
    times = jnp.where(
        beta > 0, accepted(beta, count.astype(beta.dtype)) / jnp.where(beta > 0, beta, 1), 0
    )
    rest = jnp.maximum(target - times[:, None] * jnp.minimum(draft, target / rho[:, None]), 0)
    return jnp.where(rest.sum(-1, keepdims=True) > 0, rest, target)


def make() -> Accept:
    """K-SEQ, for chains and trees of independent siblings."""
    return Accept(k_seq, _verdict.greedy, "k_seq", "L1", (CHAIN, IID))
