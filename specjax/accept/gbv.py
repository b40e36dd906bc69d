"""Greedy multi-path block verification: the best of the drafted paths, tested as one block. L1.

GBV (Thomas and Pal 2026, 2602.16961). At each node all tokens are ordered by target / draft. The
path takes the drafted token that is last in this order, level by level. It is then a draw from a
known distribution, that of the last of n draws, and block verification (Sun et al. 2025,
2403.10444) tests it as the only draft. One path is ``block`` itself. The order serves the first
level: more paths accept more on average, and fewer where the draft is nearly the target, because
the best of several draws from the target is no draw from it.

n is the number of draws that there were: the children of all nodes with the same tokens along their
paths. The authors take the mean over the numbers that are possible for i.i.d. chains; this accepts
1 to 2 % more there (random tables of 4 tokens, 2 to 4 chains of 3). Given the numbers that occurred
the rule is exact for every tree of i.i.d. siblings, also for one that branches late, or that a
controller ends.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.accept import block, verdict
from specjax.rng import RowKeys
from specjax.types import CHAIN, IID, Accept, Draft, Verdict

REFERENCE = ("thomas2026greedy", "sun2025block")


def ranks(target: jax.Array, draft: jax.Array) -> jax.Array:
    """i32[B,V]: the place of each token in the order by target / draft, f[B,V] each."""
    ratio = target / jnp.where(draft > 0, draft, jnp.finfo(draft.dtype).tiny)
    order = jnp.argsort(ratio, stable=True)
    place = jnp.broadcast_to(jnp.arange(order.shape[1], dtype=jnp.int32), order.shape)
    return jnp.put_along_axis(jnp.zeros_like(place), order, place, -1, inplace=False)


def last_of(count: jax.Array, draft: jax.Array, rank: jax.Array) -> jax.Array:
    """f[B,V]: the distribution of the last of ``count`` i32[B] draws from ``draft`` f[B,V].

    It is F(x)^n - F(before x)^n, with the distribution function F along ``rank`` i32[B,V].
    """
    ordered = jnp.put_along_axis(jnp.zeros_like(draft), rank, draft, -1, inplace=False)
    until = jnp.take_along_axis(jnp.cumsum(ordered, -1), rank, -1)
    before = jnp.maximum(until - draft, 0)

    def more(done: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, power = carry
        total = jnp.where((done < count)[:, None], total * before + power, total)
        return total, power * until

    # The quotient of both powers' difference and the token's probability.
    start = jnp.zeros_like(draft), jnp.ones_like(draft)
    return draft * jax.lax.fori_loop(0, jnp.max(count, initial=0), more, start)[0]


def best_path(draft: Draft, target_probs: jax.Array) -> tuple[jax.Array, Draft, jax.Array]:
    """The nodes i32[B,M] of the best path, the path as a chain, and the target's f[B,M+1,V].

    ``draft``: N > 0 nodes.
    """
    vocab = target_probs.shape[-1]
    tokens = jnp.clip(draft.tokens, 0, vocab - 1)

    def level(walk: verdict.Walk, _: None) -> tuple[verdict.Walk, tuple]:
        count, there = walk.open.sum(-1), walk.open.any(-1)
        drawn = verdict.draft_probs_at(draft, jnp.argmax(walk.open, -1), vocab, walk.probs.dtype)
        rank = ranks(walk.probs, drawn)
        node = jnp.argmax(jnp.where(walk.open, jnp.take_along_axis(rank, tokens, 1), -1), -1)
        seen = verdict.at(tokens, node), there, last_of(count, drawn, rank), walk.probs
        return verdict.descend(walk, draft, target_probs, node, there), seen

    walk = verdict.begin_walk(draft, target_probs)
    walk, seen = jax.lax.scan(level, walk, None, length=draft.longest)
    own, there, probs, target = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), seen)
    target = jnp.concatenate([target, walk.probs[:, None]], 1)
    return walk.path, Draft(own, there, probs=probs), target


def gbv(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The rule. ``draft``: N nodes, siblings i.i.d.; ``target_probs`` f[B,N+1,V]."""
    if not draft.tokens.shape[1]:
        return block.block(keys, draft, target_probs)
    path, chain, target = best_path(draft, target_probs)
    accepted, token = block.decide(keys, chain, target)
    index = jnp.arange(draft.longest)
    return verdict.along(draft, jnp.where(index < accepted[:, None], path, -1), token)


def make() -> Accept:
    """Block verification of the best path, for chains and trees of independent siblings."""
    return Accept(gbv, verdict.greedy, "gbv", "L1", (CHAIN, IID), whole_tree=True)
