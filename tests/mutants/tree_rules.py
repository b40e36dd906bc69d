"""Wrong acceptance rules for trees: functions (keys, draft, target_probs) -> Verdict.

The registry, with the mistake and its source, is ``mutants``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import rng
from specjax.accept import gbv, k_seq, recursive, traversal
from specjax.accept import verdict as _verdict
from specjax.types import Draft, Verdict


def equal_siblings_are_merged(keys, draft, target_probs):
    """Makes every sibling invalid that repeats the token of an earlier one."""
    parents = _verdict.parents(draft)
    same = (draft.tokens[:, :, None] == draft.tokens[:, None]) & (
        parents[:, :, None] == parents[:, None]
    )
    earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1) & draft.valid[:, None]
    valid = draft.valid & ~(same & earlier).any(-1)
    return recursive.recursive(keys, draft.replace(valid=valid), target_probs)


def best_child_first(keys, draft, target_probs):
    """Tests the first level in the order of the target's probs: the order depends on the draws."""
    before = _verdict.before(draft, target_probs)
    own = jnp.take_along_axis(before, draft.tokens[..., None], -1)[..., 0]
    parents = _verdict.parents(draft)
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
    before = _verdict.before(draft, target_probs)
    own = jnp.take_along_axis(before, draft.tokens[..., None], -1)[..., 0]
    drawn = jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]
    path, end = _verdict.deepest(draft, coins.flip(own, drawn))
    children = draft.valid & (_verdict.parents(draft) == end[:, None] - 1)
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

    walk = jax.lax.while_loop(
        lambda w: w.open.any(), level, _verdict.begin_walk(draft, target_probs)
    )
    return _verdict.along(draft, walk.path, keys.draw(rng.RESIDUAL, walk.probs))


def _gbv_with(monkey, keys, draft, target_probs):
    """``gbv`` with other functions of its module."""
    right = {name: getattr(gbv, name) for name in monkey}
    try:
        for name, wrong in monkey.items():
            setattr(gbv, name, wrong)
        return gbv.gbv(keys, draft, target_probs)
    finally:
        for name, own in right.items():
            setattr(gbv, name, own)


def gbv_with_the_law_of_one_draw(keys, draft, target_probs):
    """Tests the best path as if it were the only one."""
    return _gbv_with({"last_of": lambda count, probs, rank: probs}, keys, draft, target_probs)


def gbv_with_one_draw_too_many(keys, draft, target_probs):
    """Takes the law of the best of n + 1 draws."""
    right = gbv.last_of
    wrong = {"last_of": lambda count, probs, rank: right(count + 1, probs, rank)}
    return _gbv_with(wrong, keys, draft, target_probs)


def gbv_with_the_law_of_one_node(keys, draft, target_probs):
    """Below the first level, takes the law of one child, and not of all children of equal nodes."""
    right, first = gbv.last_of, [True]

    def law(count, probs, rank):
        # Enumeration runs the levels one after another.
        count, first[0] = (count if first[0] else jnp.ones_like(count)), False
        return right(count, probs, rank)

    return _gbv_with({"last_of": law}, keys, draft, target_probs)


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


def wrong_interior_path(keys, draft, target_probs):
    """The right tokens; the first node of a longer path is another child of the pending token."""
    verdict = recursive.recursive(keys, draft, target_probs)
    roots = draft.valid & (_verdict.parents(draft) < 0)
    other = roots & (jnp.arange(roots.shape[1]) != verdict.path[:, :1])
    moved = (verdict.count > 2) & other.any(-1)
    first = jnp.where(moved, jnp.argmax(other, -1), verdict.path[:, 0])
    return verdict.replace(path=verdict.path.at[:, 0].set(first.astype(jnp.int32)))


def never_accepts(keys, draft, target_probs):
    """Emits a draw of the target and no draft token."""
    nothing = jnp.full((draft.tokens.shape[0], draft.longest), -1, jnp.int32)
    return _verdict.along(draft, nothing, keys.draw(rng.RESIDUAL, target_probs[:, 0]))


def accepts_one_token_only(keys, draft, target_probs):
    """Ends every path after its first token; its bonus token is right."""
    top = draft.valid & (_verdict.parents(draft) < 0)
    return recursive.recursive(keys, draft.replace(valid=top), target_probs)


def siblings_in_reverse_below_the_top(keys, draft, target_probs):
    """Tests siblings in reverse order, except the children of the pending token."""
    parents = _verdict.parents(draft)[0]
    number = jnp.arange(len(parents))
    same = parents[:, None] == parents
    # The sibling that is as far from the end as this node is from the beginning.
    rank = (same & (number < number[:, None])).sum(-1)
    mirror = jnp.argmax(same & (rank == (same.sum(-1) - 1 - rank)[:, None]), -1)
    leaves = (parents >= 0) & ~(same & jnp.isin(number, parents)).any(-1)
    order = jnp.where(leaves, mirror, number)

    def take(x):
        return x[:, order]

    swapped = draft.replace(
        tokens=take(draft.tokens), valid=take(draft.valid), probs=take(draft.probs)
    )
    rows = jnp.concatenate([target_probs[:, :1], target_probs[:, 1:][:, order]], 1)
    verdict = recursive.recursive(keys, swapped, rows)
    path = jnp.where(verdict.path >= 0, order[jnp.maximum(verdict.path, 0)], -1)
    return verdict.replace(path=path.astype(jnp.int32))


def target_row_of_first_sibling(keys, draft, target_probs):
    """After a later sibling it reads the target's probs after the first one."""
    parents = _verdict.parents(draft)
    first = jnp.argmax(parents[:, :, None] == parents[:, None], -1)
    wrong = jnp.take_along_axis(target_probs[:, 1:], first[..., None], 1)
    deep = (_verdict.depths(draft) > 1)[..., None]
    rows = jnp.where(deep, wrong, target_probs[:, 1:])
    return recursive.recursive(keys, draft, jnp.concatenate([target_probs[:, :1], rows], 1))


def valid_ignored_below_the_top(keys, draft, target_probs):
    """Tests nodes below the first level that do not exist, as token 0 with uniform probs."""
    missing = ~draft.valid & (_verdict.depths(draft) > 1)
    vocab = target_probs.shape[-1]
    probs = jnp.where(missing[..., None], 1 / vocab, draft.probs)
    tokens = jnp.where(missing, 0, draft.tokens)
    return recursive.recursive(
        keys, draft.replace(tokens=tokens, probs=probs, valid=draft.valid | missing), target_probs
    )


def residual_not_normalised(keys, draft, target_probs):
    """Tests the second child against a residual that does not sum to 1."""
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    vocab = target_probs.shape[-1]

    def trial(walk):
        node, trying = jnp.argmax(walk.open, -1), walk.open.any(-1)
        probs = _verdict.draft_probs_at(draft, node, vocab, target_probs.dtype)
        token = jnp.clip(_verdict.at(draft.tokens, node), 0, vocab - 1)
        kept, total = _verdict.at(walk.probs, token), _verdict.at(probs, token)
        accepted = coins.flip(jnp.where(trying, kept, 0), jnp.where(trying, total, 0), node)
        here = jnp.arange(walk.open.shape[1]) == node[:, None]
        rest = jnp.maximum(walk.probs - probs, 0)
        rejected = (trying & ~accepted)[:, None] & (rest.sum(-1, keepdims=True) > 0)
        walk = walk.replace(open=walk.open & ~here, probs=jnp.where(rejected, rest, walk.probs))
        return _verdict.descend(walk, draft, target_probs, node, accepted)

    walk = jax.lax.while_loop(
        lambda w: w.open.any(), trial, _verdict.begin_walk(draft, target_probs)
    )
    return _verdict.along(draft, walk.path, keys.draw(rng.RESIDUAL, walk.probs))


def next_sibling_replaces_a_rejected_one(keys, draft, target_probs):
    """On a rejection of the first child it emits the second one untested: it was drawn too."""
    verdict = recursive.recursive(keys, draft, target_probs)
    second = draft.valid[:, 1] & (draft.tokens[:, 1] != draft.tokens[:, 0])
    none = (verdict.count == 1) & second
    token = jnp.where(none, draft.tokens[:, 1], verdict.tokens[:, 0])
    return verdict.replace(tokens=verdict.tokens.at[:, 0].set(token))
