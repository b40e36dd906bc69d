"""The number of tree nodes that are verified: expected tokens by the time of the round. Per batch.

CaDDTree (2606.01813). The number of accepted tokens never falls with the size of a tree, so the
tree alone cannot choose its size: the cost of the pass has to. The nodes of a grown tree are
ordered by the chance that their whole path is accepted, so the first n of them are the best tree
of n nodes, and the round is expected to emit 1 + the sum of their chances. All rows of a batch are
verified in one pass, so all get the same n, each its own n best nodes, and the mean over live rows
counts. n is one of the sizes whose widths are compiled, 1, 3, 7, ...: all of them are compared, so
the costs need not be convex, as they must be for the greedy stop of the paper.

The paper maximises tokens per second of each round. A text has many rounds, and the most tokens
per second of the text need the n with the most tokens less ``pace`` times the time, where ``pace``
is the rate of the rounds so far (plain decoding's at least): good rounds get more nodes and bad
ones fewer. Until rounds are known both are the same.

The chance of a node, given its parent, is the draft's probability at first. It is replaced by what
was observed: nodes are counted in classes by their probability, verified ones with an accepted
parent, and how many of them were accepted. A temperature or a greedy target changes acceptance,
not the draft's probability, so this matters. A lookup has no probabilities; its classes are depth
and rank among siblings.

Where drafts do not pay, the next rounds have none. A sum of what drafts were expected to lose, the
time of their rounds less their tokens, never falls below 0 (a cumulative sum test, Page 1954). At
``patience`` the drafts stop. One is then tried as soon as ``explore`` times the rounds without one,
less what a draft model has to read of them, have paid for the mean loss of the last ones, and
drafts go on when the sum falls.

Which nodes are left out depends on their tokens. This leaves the output law unchanged only if the
tree is a function of the committed text: with the most probable tokens as siblings, dynamic, beam,
best-first, or of a lookup. Drawn trees are refused (``without_replacement`` with three tokens:
the law differs by more than .01, see the tests).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import declare, tree
from specjax.bound import Bound
from specjax.control import costs as costs_lib
from specjax.control._controller import FOREVER, Controller, Setup, live_mean, of_others
from specjax.declare import key, share
from specjax.topology import dynamic
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "he2026cost"

# The classes of nodes: by log-odds of the probability, or by depth and rank.
CLASSES, RANKS = 12, 3
# What a lookup's node of rank r is first assumed to have: ACCEPTANCE * FALL**r.
FALL = 0.3


class State(struct.PyTreeNode):
    """What is kept from round to round."""

    greedy: Array  # bool[B] the rows without sampling
    live: Array  # bool[B] the rows that are not finished
    classes: Array  # i32[B,N] of the nodes of the last tree, best first
    # f32[B,CLASSES] nodes that were accepted, and tested; later ones count more
    passed: Array
    tested: Array
    # f32[B] expected tokens of a row in rounds with drafts, and their time; equal in all rows
    gained: Array
    spent: Array
    lost: Array  # f32[B] the sum of what they lost, from 0 to ``patience``; equal in all rows
    idle: Array  # i32[B] rounds since the last draft
    due: Array  # i32[B] the rounds without a draft that pay for a trial, equal in all rows


class Keys(declare.Keys, owner="budget's "):
    """The keys of ``budget``."""

    profile: str = key("", f'{costs_lib.PROFILE}; "": the next keys')
    most: int | None = key(
        None,
        "the most nodes that are verified; None: those of the profile, or 64",
        least=1,
    )
    draft: float | None = costs_lib.cost_key("drafting one level", costs_lib.DRAFT)
    verify: float | None = costs_lib.verify_key(costs_lib.NODES)
    weight: float = key(4.0, "of the draft's probabilities, in tested nodes of a class", above=0)
    memory: float = share(0.95, "how much a round counts against the next one")
    patience: float = key(
        4.0, "what drafts may lose before they stop, in rounds without a draft", least=0
    )
    explore: float = share(0.01, costs_lib.EXPLORE)


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """The number of nodes with the most expected tokens per second.

    Raises:
        UserError: a number out of range, a profile that cannot be read, lacks the batch size, or
            has costs of draft lengths in the place of tree sizes.
    """
    known = costs_lib.known(keys, 64, costs_lib.NODES)
    setup = Setup(known, keys)
    return Controller(
        "budget",
        init=Bound(_init, setup),
        update=Bound(_update, setup),
        limit=Bound(_limit, setup),
        size=Bound(_size, setup),
        check_rows=costs_lib.check_rows(known),
        most_nodes=setup.most,
        shared=True,
    )


def _init(setup: Setup, context: Context) -> State:
    batch = len(context.length)
    counts, zeros = jnp.zeros((batch, CLASSES), jnp.float32), jnp.zeros((batch,), jnp.float32)
    none = jnp.zeros((batch,), jnp.int32)
    classes = jnp.zeros((batch, setup.most), jnp.int32)
    greedy, live = jnp.asarray(context.sampling.greedy, bool), ~context.finished
    return State(greedy, live, classes, counts, counts, zeros, zeros, zeros, none, none)


def _limit(setup: Setup, state: State) -> Array:
    rests = (state.lost.max() >= setup.keys.patience) & (state.idle.max() < state.due.max())
    return jnp.full(state.due.shape, jnp.where(rests, 0, FOREVER), jnp.int32)


def _size(
    setup: Setup, state: State, draft: Draft, log_prob: Array | None
) -> tuple[Array, Array, State]:
    """The nodes in order i32[B,N], how many of them i32[B] are verified, and the state."""
    keys, (batch, nodes) = setup.keys, draft.tokens.shape
    classes, prior = _by_rank(draft) if log_prob is None else _by_probability(log_prob)
    chance = _observed(state, keys.weight, classes, prior)
    order, reached = dynamic.by_chance(jnp.log(chance), draft.parents, draft.valid)
    sizes = costs_lib.sizes(min(nodes, setup.most))[1:]
    times, empty = _times(setup, state, sizes, draft.longest, log_prob is None)
    tokens = 1 + live_mean(state.live, jnp.cumsum(reached, 1))[np.array(sizes) - 1]
    first = jnp.argmax(tokens / times)
    # They are equal in all rows but those that were put in since, which have 0.
    gained, spent, lost = (x.max() for x in (state.gained, state.spent, state.lost))
    pace = (gained + keys.weight * tokens[first]) / (spent + keys.weight * times[first])
    best = jnp.argmax(tokens - jnp.maximum(pace, 1) * times)
    time = jnp.where(live_mean(state.live, reached[:, 0]) > 0, times[best], empty)
    gained, spent = keys.memory * gained + tokens[best], keys.memory * spent + time
    lost = jnp.clip(lost + time - tokens[best], 0, keys.patience)
    due = jnp.int32(FOREVER)
    if keys.explore:
        loss = (1 - gained / spent) * time
        saves = keys.explore - setup.mean("missed", state)[0]
        rounds = jnp.clip(jnp.ceil(loss / jnp.maximum(saves, 1e-9)), 1, FOREVER)
        due = jnp.where(saves > 0, rounds, FOREVER).astype(jnp.int32)
    kept = jnp.take_along_axis(classes, order, 1)[:, : setup.most]
    state = state.replace(
        classes=state.classes.at[:, : kept.shape[1]].set(kept),
        gained=jnp.full((batch,), gained, jnp.float32),
        spent=jnp.full((batch,), spent, jnp.float32),
        lost=jnp.full((batch,), lost, jnp.float32),
        idle=jnp.zeros_like(state.idle),
        due=jnp.full((batch,), due, jnp.int32),
    )
    return order, jnp.full((batch,), jnp.array(sizes, jnp.int32)[best]), state


def _times(
    setup: Setup, state: State, sizes: tuple[int, ...], levels: int, lookup: bool
) -> tuple[Array, Array]:
    """f32[n] the times of rounds with so many nodes, and f32[] of one in which no row has any."""
    costs = setup.costs(state)

    def both(value: np.ndarray | float, other: np.ndarray | float) -> Array:
        greedy = live_mean(state.live, state.greedy.astype(jnp.float32))
        return greedy * jnp.asarray(value, jnp.float32) + (1 - greedy) * jnp.asarray(other)

    drafting = 0.0 if setup.keys.profile else levels * costs_lib.drafting(setup.keys)
    at = [np.interp(sizes, costs.lengths, kind.times) + drafting for kind in costs[1:]]
    none = [kind.empty + drafting if lookup else at[i][0] for i, kind in enumerate(costs[1:])]
    return both(*at).astype(jnp.float32), both(*none).astype(jnp.float32)


def _by_probability(log_prob: Array) -> tuple[Array, Array]:
    """The class i32[B,N] and the probability f32[B,N] of nodes, given their parents."""
    # No node is certain, and none impossible: both have logarithms.
    prob = jnp.clip(jnp.exp(log_prob.astype(jnp.float32)), 1e-6, 1 - 1e-6)
    place = jnp.floor(jnp.log(prob / (1 - prob))) + CLASSES // 2
    return jnp.clip(place, 0, CLASSES - 1).astype(jnp.int32), prob


def _by_rank(draft: Draft) -> tuple[Array, Array]:
    """The same of a draft without probabilities."""
    assert draft.parents is not None
    exist = tree.exists(draft.valid, draft.parents)
    same = (draft.parents[:, :, None] == draft.parents[:, None]) & exist[:, None]
    rank = jnp.tril(same, -1).sum(-1)
    depth = tree.depths(draft.parents, *draft.tokens.shape)
    classes = jnp.minimum(depth, CLASSES // RANKS - 1) * RANKS + jnp.minimum(rank, RANKS - 1)
    return classes.astype(jnp.int32), costs_lib.ACCEPTANCE * FALL ** rank.astype(jnp.float32)


def _observed(state: State, weight: float, classes: Array, prior: Array) -> Array:
    """f32[B,N]: the acceptance of the row's class, towards other rows', towards ``prior``."""

    def at(counts: Array) -> Array:
        return jnp.take_along_axis(counts, classes, 1)

    counts, live = (state.passed, state.tested), state.live[:, None]
    passed, tested = (at(of_others(x * live)) for x in counts)
    others = (passed + weight * prior) / (tested + weight)
    passed, tested = map(at, counts)
    return (passed + weight * others) / (tested + weight)


def _update(setup: Setup, state: State, draft: Draft, verdict: Verdict) -> State:
    live, nodes = verdict.count > 0, min(draft.tokens.shape[1], setup.most)
    # A round that another drafter wrote in all rows does not end them.
    state = state.replace(live=jnp.where(live.any(), live, state.live), idle=state.idle + 1)
    if not nodes or draft.parents is None:
        return state
    exist = tree.exists(draft.valid, draft.parents)[:, :nodes] & live[:, None]
    parents = draft.parents[:, :nodes]
    accepted = (verdict.path[:, :, None] == jnp.arange(nodes)).any(1)
    above = jnp.take_along_axis(accepted, jnp.maximum(parents, 0), 1) | (parents < 0)
    own = jax.nn.one_hot(state.classes[:, :nodes], CLASSES, dtype=jnp.float32)
    both = exist & above, exist & above & accepted
    tested, passed = ((own * which[..., None]).sum(1) for which in both)
    keep = jnp.where(tested > 0, setup.keys.memory, 1)
    return state.replace(
        passed=(keep * state.passed + passed).astype(jnp.float32),
        tested=(keep * state.tested + tested).astype(jnp.float32),
    )
