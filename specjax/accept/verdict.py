"""What a new rule needs: verdicts from accepted nodes, and reading a draft.

A complete rule for chains. It tests the tokens one after another, and draws the token after them
from what is left of the target's probabilities:

    def sampled(keys, draft, target_probs):
        exists = verdict.chain_nodes(draft)
        coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
        target_mass, draft_mass = verdict.masses(draft, target_probs)
        passed = coins.flip(target_mass, draft_mass) & exists
        accepted = verdict.first_failure(passed)
        token = keys.draw(rng.RESIDUAL, verdict.leftover(accepted, draft, target_probs))
        return verdict.prefix(draft, accepted, token)


    rule = Accept(sampled, verdict.greedy, "mine", "L1", (types.CHAIN,))
    print(testing.check_accept(rule))

Drafts of 0 nodes occur. All arrays then have an axis of size 0, and the rule must draw a token from
``target_probs[:, 0]``. ``leftover`` and ``prefix`` do so; indexing the draft would raise.

For trees see ``specjax.accept.recursive``, which uses ``before``, ``parents`` and ``along``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from specjax import sampling, tree
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.types import Draft, Verdict

# Shared by the rules: a verdict from an accepted path, and the verdict at temperature 0.


def chain_nodes(draft: Draft) -> jax.Array:
    """bool[B,N]: which nodes of a chain exist. Raises UserError for a tree."""
    if draft.parents is not None:
        raise UserError(
            "this acceptance rule takes chains, and the drafter drafts trees; choose a tree rule"
        )
    return draft.valid


def first_failure(passed: jax.Array) -> jax.Array:
    """bool[B,N] -> i32[B]: the number of entries before the first False."""
    return jnp.cumprod(passed.astype(jnp.int32), axis=-1).sum(-1)


def in_order(
    keys: RowKeys, draft: Draft, target_mass: jax.Array, draft_mass: jax.Array
) -> jax.Array:
    """i32[B]: how many tokens of a chain are accepted one after another, with coins of ``keys``.

    Each is accepted with probability min(1, target_mass / draft_mass), f32[B,N] both. Raises
    UserError for a tree.
    """
    exists = chain_nodes(draft)
    coins = keys.coins(draft.tokens.shape[1], target_mass.dtype)
    return first_failure(coins.flip(target_mass, draft_mass) & exists)


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values [B,K,...] at index i32[B] -> [B,...]."""
    return jax.vmap(lambda row, i: row[i])(values, index)


def draft_probs_at(draft: Draft, node: jax.Array, vocab: int, dtype) -> jax.Array:
    """f[B,V]: the distribution that node i32[B] was drawn from; one-hot if deterministic."""
    if draft.probs is None:
        return jax.nn.one_hot(at(draft.tokens, node), vocab, dtype=dtype)
    return at(draft.probs, node)


def along(draft: Draft, path: jax.Array, token: jax.Array) -> Verdict:
    """The draft tokens on ``path`` i32[B,M] (-1 padded), then ``token`` i32[B]."""
    index = jnp.arange(path.shape[1] + 1)
    accepted = (path >= 0).sum(-1)[:, None]
    drafted = path
    if draft.tokens.shape[1]:
        drafted = jnp.take_along_axis(draft.tokens, jnp.maximum(path, 0), axis=1)
    drafted = jnp.pad(drafted, ((0, 0), (0, 1)))
    tokens = jnp.where(index < accepted, drafted, jnp.where(index == accepted, token[:, None], -1))
    count = accepted[:, 0] + 1
    return Verdict(tokens.astype(jnp.int32), count.astype(jnp.int32), path.astype(jnp.int32))


def prefix(draft: Draft, accepted: jax.Array, token: jax.Array) -> Verdict:
    """The first ``accepted`` i32[B] tokens of a chain, then ``token`` i32[B]."""
    index = jnp.arange(draft.tokens.shape[1])
    return along(draft, jnp.where(index < accepted[:, None], index, -1), token)


def deepest(
    draft: Draft, passed: jax.Array, score: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The longest path of nodes that all passed (bool[B,N]).

    Between equally long paths the higher sum of ``score`` f[B,N] along the path wins, then the
    lower node. Returns its nodes i32[B,M], and the index i32[B] of its end in the target's output
    (0 is the pending token).
    """
    if not draft.tokens.shape[1]:
        batch = draft.tokens.shape[0]
        return jnp.full((batch, draft.longest), -1, jnp.int32), jnp.zeros((batch,), jnp.int32)
    alive = tree.exists(draft.valid & passed, draft.parents)
    if draft.parents is None:
        count = alive.sum(-1)
        index = jnp.arange(alive.shape[1])
        return jnp.where(index < count[:, None], index, -1).astype(jnp.int32), count
    inside = tree.ancestors(draft.parents)
    depth = jnp.where(alive, inside.sum(-1), 0)
    best = depth == depth.max(-1, keepdims=True)
    if score is not None:
        total = jnp.where(inside, jnp.where(draft.valid, score, 0)[:, None], 0).sum(-1)
        total = jnp.where(best, total, -jnp.inf)
        best &= total == total.max(-1, keepdims=True)
    end = jnp.where(alive.any(-1), jnp.argmax(best, -1), -1)
    return tree.path_to(end, draft.parents, draft.longest), end + 1


def greedy(draft: Draft, logits: jax.Array) -> Verdict:
    """Accepts draft tokens while they are the target's argmax, on the longest path.

    Then emits the argmax after them. The limit of every lossless rule at temperature 0.
    """
    best = sampling.argmax(logits)
    if draft.parents is None:
        passed = draft.tokens == best[:, :-1]
    else:
        passed = draft.tokens == jnp.take_along_axis(best, draft.parents + 1, 1)
    path, end = deepest(draft, passed)
    return along(draft, path, at(best, end))


def masses(draft: Draft, target_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The probability of each draft token under the target and under the draft, f32[B,N] each.

    A token is accepted with probability min(1, target/draft). Both are 1 where a node does not
    exist: the coin there is not used.
    """

    target_mass = jnp.where(draft.valid, of_tokens(draft, target_probs[:, :-1]), 1)
    if draft.probs is None:
        return target_mass, jnp.ones_like(target_mass)
    return target_mass, jnp.where(draft.valid, of_tokens(draft, draft.probs), 1)


def of_tokens(draft: Draft, values: jax.Array) -> jax.Array:
    """f[B,N]: of values f[B,N,V] those of the draft tokens."""
    tokens = jnp.clip(draft.tokens, 0, values.shape[-1] - 1)
    return jnp.take_along_axis(values, tokens[..., None], -1)[..., 0]


def leftover(
    accepted: jax.Array, draft: Draft, target_probs: jax.Array, scale: jax.Array | float = 1.0
) -> jax.Array:
    """Weights f32[B,V] (not normalised) of the token after ``accepted`` i32[B] draft tokens.

    After a full chain the target's probs; otherwise the residual max(target - scale * draft, 0)
    (``scale`` a number or f32[B,1]; a deterministic draft is one-hot). Where the residual is 0
    everywhere by rounding, the target's probs.
    """
    probs = at(target_probs, accepted)
    nodes = draft.tokens.shape[1]
    if nodes == 0:
        return probs
    node = jnp.minimum(accepted, nodes - 1)
    rejected = (accepted < nodes) & at(draft.valid, node)
    taken = scale * draft_probs_at(draft, node, probs.shape[-1], probs.dtype)
    residual = jnp.where(rejected[:, None], jnp.maximum(probs - taken, 0), probs)
    return jnp.where(residual.sum(-1, keepdims=True) > 0, residual, probs)


def law_of_test(draft_probs: jax.Array, accepted: jax.Array, residual: jax.Array) -> jax.Array:
    """The law f[...,V] of the token at a place where one draft token is tested.

    Args:
        draft_probs: f[...,V] that the token is drawn from.
        accepted: bool or f[...,V] the probability that each token is accepted.
        residual: f[...,V] weights of the token that is emitted in the place of a rejected one.
    """
    passed = draft_probs * accepted
    total = residual.sum(-1, keepdims=True)
    rest = jnp.maximum(1 - passed.sum(-1, keepdims=True), 0)
    return passed + rest * residual / jnp.where(total > 0, total, 1)


# A walk down a tree, for rules that test the children of one accepted prefix after another.
#
# With independent siblings, several nodes may have the same tokens along their paths (copies). The
# walk continues from all copies at once: the children of every copy are draws from the same
# distribution, and each of them is tested.


class Walk(struct.PyTreeNode):
    """The state of a walk, per row."""

    open: jax.Array  # bool[B,N] children of the accepted prefix that have not been tested
    seen: jax.Array  # bool[B,N] all children of the accepted prefix
    # f[B,V] the distribution of the next token if none of the open nodes is accepted
    probs: jax.Array
    path: jax.Array  # i32[B,M] accepted nodes, -1 padded

    @property
    def level(self) -> jax.Array:
        """i32[B]: the number of accepted nodes."""
        return (self.path >= 0).sum(-1)


def parents(draft: Draft) -> jax.Array:
    """i32[B,N], also for a chain."""
    if draft.parents is not None:
        return draft.parents
    return jnp.broadcast_to(jnp.arange(draft.tokens.shape[1]) - 1, draft.tokens.shape)


def begin_walk(draft: Draft, target_probs: jax.Array) -> Walk:
    """A walk at the pending token."""
    first = draft.valid & (parents(draft) < 0)
    path = jnp.full((draft.tokens.shape[0], draft.longest), -1, jnp.int32)
    return Walk(first, first, target_probs[:, 0], path)


def walk_down(draft: Draft, target_probs: jax.Array, turn: Callable[[Walk], Walk]) -> Walk:
    """The walk after as many turns as there are open nodes; ``turn`` tests some of them."""
    walk = begin_walk(draft, target_probs)
    if not draft.tokens.shape[1]:
        return walk
    return jax.lax.while_loop(lambda walk: walk.open.any(), turn, walk)


def descend(
    walk: Walk, draft: Draft, target_probs: jax.Array, node: jax.Array, accepted: jax.Array
) -> Walk:
    """Moves the rows ``accepted`` bool[B] to ``node`` i32[B], an open node, and to its copies."""
    size = draft.tokens.shape[1]
    token = at(draft.tokens, node)
    # bool[B,N+1]; column 0 is the pending token, which is no copy.
    copies = jnp.pad(walk.seen & (draft.tokens == token[:, None]), ((0, 0), (1, 0)))
    children = draft.valid & jnp.take_along_axis(copies, parents(draft) + 1, 1)
    place = jnp.arange(walk.path.shape[1]) == walk.level[:, None]
    moved = accepted[:, None]
    return Walk(
        open=jnp.where(moved, children, walk.open),
        seen=jnp.where(moved, children, walk.seen),
        probs=jnp.where(moved, at(target_probs, jnp.minimum(node + 1, size)), walk.probs),
        path=jnp.where(moved & place, node[:, None], walk.path).astype(jnp.int32),
    )


def before(draft: Draft, values: jax.Array) -> jax.Array:
    """values f[B,N+1,V] at the parent of each draft node: f[B,N,V]."""
    if draft.parents is None:
        return values[:, :-1]
    return jnp.take_along_axis(values, (draft.parents + 1)[..., None], axis=1)


def depths(draft: Draft) -> jax.Array:
    """i32[B,N]: 1 for a child of the pending token."""
    return tree.depths(draft.parents, *draft.tokens.shape) + 1


def matched(
    draw: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    draft: Draft,
    target_probs: jax.Array,
) -> Verdict:
    """Sample-then-match with the tokens i32[B] of ``draw(depth i32[], probs f[B,V], active)``.

    ``active`` bool[B] marks the rows in which the token is used.
    """
    batch = draft.tokens.shape[0]
    first = draw(jnp.zeros((), jnp.int32), target_probs[:, 0], jnp.ones((batch,), bool))
    if draft.tokens.shape[1] == 0:
        return along(draft, jnp.zeros((batch, 0), jnp.int32), first)

    def hits(walk: Walk, token: jax.Array) -> jax.Array:
        return walk.open & (draft.tokens == token[:, None])

    def level(carry):
        walk, token, depth = carry
        hit = hits(walk, token)
        matched = hit.any(-1)
        walk = descend(walk, draft, target_probs, jnp.argmax(hit, -1), matched)
        depth = depth + 1
        return walk, jnp.where(matched, draw(depth, walk.probs, matched), token), depth

    start = (begin_walk(draft, target_probs), first, jnp.zeros((), jnp.int32))
    walk, token, _ = jax.lax.while_loop(lambda carry: hits(*carry[:2]).any(), level, start)
    return along(draft, walk.path, token)
