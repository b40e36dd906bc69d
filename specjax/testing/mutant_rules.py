"""Wrong acceptance rules: functions (keys, draft, target_probs) -> Verdict.

The registry, with the mistake and its source, is ``specjax.testing.mutants``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import rng
from specjax.accept import _verdict, _walk, block, chain, k_seq, recursive, traversal
from specjax.types import Draft, Verdict


def _accepted(keys, draft, target_probs):
    """bool[B,N]: the token-wise test of speculative sampling, on a chain."""
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    return coins.flip(*chain.masses(draft, target_probs)) & draft.valid


def _emit(keys, draft, accepted, probs):
    """The first ``accepted`` tokens, then a token drawn from ``probs``."""
    return _verdict.prefix(draft, accepted, keys.draw(rng.RESIDUAL, probs))


def resample_from_target(keys, draft, target_probs):
    accepted = _verdict.first_failure(_accepted(keys, draft, target_probs))
    return _emit(keys, draft, accepted, _verdict.at(target_probs, accepted))


def match_then_resample(keys, draft, target_probs):
    path, probs = _match_path(keys, draft, target_probs)
    return _verdict.along(draft, path, keys.draw(rng.RESIDUAL, probs))


def _match_path(keys, draft, target_probs):
    """Sample-then-match without the token at the mismatch: path, and target probs at its end."""
    walk = _walk.begin(draft, target_probs)
    for depth in range(draft.longest):
        active = walk.open.any(-1)
        token = keys.draw_at(depth, walk.probs, active)
        hit = walk.open & (draft.tokens == token[:, None]) & active[:, None]
        ended = ~hit.any(-1)[:, None]
        walk = walk.replace(open=walk.open & ~ended)
        walk = _walk.descend(walk, draft, target_probs, jnp.argmax(hit, -1), hit.any(-1))
    return walk.path, walk.probs


def residual_after_full_chain(keys, draft, target_probs):
    accepted = _verdict.first_failure(_accepted(keys, draft, target_probs))
    full = (accepted == draft.tokens.shape[1])[:, None]
    wrong = recursive.residual(target_probs[:, -1], draft.probs[:, -1])
    probs = jnp.where(full, wrong, chain.leftover(accepted, draft, target_probs))
    return _emit(keys, draft, accepted, probs)


def continues_after_rejection(keys, draft, target_probs):
    kept = _accepted(keys, draft, target_probs)
    accepted = jnp.max(jnp.where(kept, jnp.arange(1, kept.shape[1] + 1), 0), -1)
    return _emit(keys, draft, accepted, chain.leftover(accepted, draft, target_probs))


def unadjusted_bonus_token(keys, draft, target_probs):
    """At temperature 1/2 the probs without temperature are the square root of those with it."""
    accepted = _verdict.first_failure(_accepted(keys, draft, target_probs))
    full = (accepted == draft.tokens.shape[1])[:, None]
    residual = chain.leftover(accepted, draft, target_probs)
    return _emit(keys, draft, accepted, jnp.where(full, jnp.sqrt(target_probs[:, -1]), residual))


def _block_test(keys, draft, target_probs):
    """The tests bool[B,N] of block verification, and its weights f[B,N+1]."""
    weight = block.weights(draft, target_probs)
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    return coins.flip(*block.chances(draft, target_probs, weight)), weight


def block_stops_at_first_rejection(keys, draft, target_probs):
    passed, weight = _block_test(keys, draft, target_probs)
    accepted = _verdict.first_failure(passed)
    return _emit(keys, draft, accepted, block.after(accepted, draft, target_probs, weight))


def block_with_chain_residual(keys, draft, target_probs):
    passed, _ = _block_test(keys, draft, target_probs)
    accepted = jnp.max(jnp.where(passed, jnp.arange(1, passed.shape[1] + 1), 0), -1)
    return _emit(keys, draft, accepted, chain.leftover(accepted, draft, target_probs))


def equal_siblings_are_merged(keys, draft, target_probs):
    """Makes every sibling invalid that repeats the token of an earlier one."""
    parents = _walk.parents(draft)
    same = (draft.tokens[:, :, None] == draft.tokens[:, None]) & (
        parents[:, :, None] == parents[:, None]
    )
    earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1) & draft.valid[:, None]
    valid = draft.valid & ~(same & earlier).any(-1)
    return recursive.recursive(keys, draft.replace(valid=valid), target_probs)


def best_child_first(keys, draft, target_probs):
    """Tests the first level in the order of the target's probs: the order depends on the draws."""
    before = _walk.before(draft, target_probs)
    own = jnp.take_along_axis(before, draft.tokens[..., None], -1)[..., 0]
    parents = _walk.parents(draft)
    order = jnp.argsort(jnp.where(parents < 0, -own, jnp.inf), axis=-1)

    def take(x):
        return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), 1)

    where = jnp.argsort(order, -1)
    moved = jnp.where(parents < 0, -1, jnp.take_along_axis(where, jnp.maximum(parents, 0), 1))
    changed = Draft(
        take(draft.tokens), take(draft.valid), take(moved), take(draft.probs), depth=draft.depth
    )
    rows = jnp.concatenate([jnp.zeros_like(order[:, :1]), order + 1], 1)
    probs = jnp.take_along_axis(target_probs, rows[..., None], 1)
    verdict = recursive.recursive(keys, changed, probs)
    path = jnp.take_along_axis(order, jnp.maximum(verdict.path, 0), 1)
    path = jnp.where(verdict.path >= 0, path, -1).astype(jnp.int32)
    return Verdict(verdict.tokens, verdict.count, path)


def longest_of_separate_chains(keys, draft, target_probs):
    """Tests each root-to-leaf chain with its own noise, and takes the longest."""
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    before = _walk.before(draft, target_probs)
    own = jnp.take_along_axis(before, draft.tokens[..., None], -1)[..., 0]
    drawn = jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]
    path, end = _verdict.deepest(draft, coins.flip(own, drawn))
    children = draft.valid & (_walk.parents(draft) == end[:, None] - 1)
    at_end = _verdict.at(target_probs, end)
    rejected = recursive.residual(at_end, _verdict.at(draft.probs, jnp.argmax(children, -1)))
    probs = jnp.where(children.any(-1)[:, None], rejected, at_end)
    return _verdict.along(draft, path, keys.draw(rng.RESIDUAL, probs))


def traversal_with_wrong_weight(keys, draft, target_probs):
    """Divides the residual mass by the remaining draft mass, Z / sum(D without x)."""
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)

    def turn(carry):
        visit, probs = carry
        visit = traversal.descend(visit, probs, draft)
        accepted = traversal.accepts(visit, coins)
        after, rest = traversal.leave(visit, probs, draft, accepted)
        node, parent = jnp.maximum(visit.at - 1, 0), after.at
        drawn = _verdict.at(draft.probs, node)
        weight = _verdict.at(visit.weight, parent)[:, None]
        residual = jnp.maximum(weight * _verdict.at(probs, parent) - drawn, 0).sum(-1)
        wrong = jnp.minimum(1, residual / jnp.maximum(1 - drawn.max(-1), 1e-9))
        changed = (~visit.done & ~accepted)[:, None] & (
            jnp.arange(visit.weight.shape[1]) == parent[:, None]
        )
        return after.replace(weight=jnp.where(changed, wrong[:, None], after.weight)), rest

    start = (traversal.begin(draft, target_probs), target_probs)
    visit, probs = jax.lax.while_loop(lambda carry: ~carry[0].done.all(), turn, start)
    return traversal.finish(keys, draft, visit, probs)


def k_seq_with_small_rho(keys, draft, target_probs):
    """Divides by a rho below the smallest for which the residual is nowhere negative."""
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)

    def level(walk):
        some = k_seq.candidates(walk, draft)
        rho = 1 + 0.5 * (k_seq.solve(some.number, walk.probs, some.probs) - 1)
        return k_seq.try_all(walk, draft, target_probs, some, rho, coins)

    walk = jax.lax.while_loop(lambda w: w.open.any(), level, _walk.begin(draft, target_probs))
    return _verdict.along(draft, walk.path, keys.draw(rng.RESIDUAL, walk.probs))


def padding_is_tested(keys, draft, target_probs):
    """Tests nodes that do not exist, as token 0."""
    tokens = jnp.where(draft.valid, draft.tokens, 0)
    all_valid = draft.replace(tokens=tokens, valid=jnp.ones_like(draft.valid))
    return recursive.recursive(keys, all_valid, target_probs)


def invalid_siblings_are_subtracted(keys, draft, target_probs):
    """Subtracts the probs of an invalid sibling, as if it had been tested and rejected."""
    valid = draft.valid
    residual = recursive.residual(target_probs[:, 0], draft.probs[:, 0])
    right = (valid[:, 0] | ~valid[:, 1])[:, None]
    first = jnp.where(right, target_probs[:, 0], residual)
    return recursive.recursive(keys, draft, target_probs.at[:, 0].set(first))


def residual_with_draft_noise(keys, draft, target_probs):
    """Draws the residual token with the key that drew the first draft token."""
    accepted = _verdict.first_failure(_accepted(keys, draft, target_probs))
    probs = chain.leftover(accepted, draft, target_probs)
    return _verdict.prefix(draft, accepted, keys.draw(rng.DRAFT, probs, 0))


def one_number_for_coin_and_residual(keys, draft, target_probs):
    """Uses one uniform number twice: for the rejection and for the residual token."""
    u = jax.vmap(lambda k: jax.random.uniform(k, draft.tokens.shape[1:]))(keys.at_round(rng.ACCEPT))
    target_mass, draft_mass = chain.masses(draft, target_probs)
    accepted = _verdict.first_failure((u * draft_mass < target_mass) & draft.valid)
    reused = _verdict.at(u, jnp.minimum(accepted, u.shape[1] - 1))[:, None]
    total = jnp.cumsum(chain.leftover(accepted, draft, target_probs), -1)
    return _verdict.prefix(draft, accepted, jnp.argmax(total > reused * total[:, -1:], -1))


def noise_of_first_round(keys, draft, target_probs):
    """Uses the keys of round 0 in every round (Sequoia's ``r`` and ``rand``)."""
    return chain.chain(keys.replace(round=jnp.zeros_like(keys.round)), draft, target_probs)


def coins_requested_twice(keys, draft, target_probs):
    """Requests its coins again at the second token."""
    coins = [keys.coins(draft.tokens.shape[1], target_probs.dtype) for _ in range(2)]
    first, again = (each.flip(*chain.masses(draft, target_probs)) for each in coins)
    kept = jnp.concatenate([first[:, :1], again[:, :-1]], 1) & draft.valid
    accepted = _verdict.first_failure(kept)
    return _emit(keys, draft, accepted, chain.leftover(accepted, draft, target_probs))
