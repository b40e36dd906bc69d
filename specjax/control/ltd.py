"""The depth of a tree and the number of its nodes, by two small networks that were fitted. Per row.

Learning to Draft (LTD, Zhang et al. 2026, 2603.01639). After each level a depth policy says whether
the tree gets the next one. Then a size policy says how many of its nodes are verified: those with
the highest probability of their path. The depth policy reads the probabilities of the candidates of
the next level, the size policy those of the tree; both read the depth and the length of the text
(section 4).

Mode bench fits them (``fit``) to rounds of the prompts that are not measured. Each round is played
with a tree of every depth from the same state, so it is known what every depth and every size would
have brought. The expected tokens and the expected time of two stochastic policies are then sums,
and their gradients are exact. Decoding takes the more probable action.

The paper samples one action a round and trains by PPO, one policy after the other. Its reward is
the mean of the rounds' tokens per second. Here both are fitted at once, and to the tokens of all
rounds over their time: this is the speed of a text. Its networks read all probabilities and have
two hidden layers of 512 and 256; these read the highest ones and have one layer of 32, and sizes
are those whose widths are compiled.

Every tree has at least one level and one node. Where no draft pays, ``budget`` and ``goodput`` stop
drafting, and these policies do not. A batch verifies as many nodes as its largest tree has, and
drafts as many levels as its deepest one. The times were those of batches whose rows are equal.

Which nodes are left out depends on their tokens. This leaves the output law unchanged only if the
tree is a function of the committed text, as for ``budget``. Drawn trees are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from specjax import declare, sampling
from specjax.bound import Bound
from specjax.control import _controller
from specjax.control import costs as costs_lib
from specjax.control._controller import FOREVER, Ahead, Controller
from specjax.control.costs import Known
from specjax.declare import key
from specjax.errors import UserError
from specjax.topology import dynamic
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "zhang2026learning"

# The candidates of a level whose probabilities are read, and the places of the nodes, best first.
CANDIDATES = 10
PLACES = np.array([0, 1, 2, 3, 4, 5, 7, 9, 12, 15, 20, 26, 34, 45, 59], np.int32)
HIDDEN = 32
# Of a fit: steps between two looks at the rounds that are held out, how often, their share.
STEPS, LOOKS, HELD_OUT = 50, 16, 5
LEAST_ROUNDS = 20
RATE, DECAY = 1e-2, 1e-3

Network = tuple[np.ndarray, ...]  # f32[F,HIDDEN], f32[HIDDEN], f32[HIDDEN,A], f32[A]
Policy = tuple[Network, Network]  # of the depth, with A = 1; of the size


class State(struct.PyTreeNode):
    """What is kept from round to round."""

    greedy: Array  # bool[B] the rows without sampling
    length: Array  # i32[B] of the committed text


class Recorded(struct.PyTreeNode):
    """The last round of each row: what the policies read of it, and what was accepted."""

    deepest: Array  # i32[B] the levels that the next tree gets
    length: Array  # i32[B] of the committed text
    candidates: Array  # f32[B,D,F] before each level
    nodes: Array  # f32[B,G] of the whole tree
    accepted: Array  # bool[B,N] of its nodes, best first


class Rounds(NamedTuple):
    """M recorded rounds, each with trees of 1, ..., D levels."""

    candidates: np.ndarray  # f32[M,D,F] before each level; the first is not read
    nodes: np.ndarray  # f32[M,D,G] of the tree that ends with each level
    tokens: np.ndarray  # f32[M,D,S] that the round emits, with each of S sizes


class Keys(declare.Keys, owner="ltd's "):
    """The keys of ``ltd``."""

    profile: str = key("", f"{costs_lib.PROFILE}: it has the two policies")


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """The depth and the number of nodes that two fitted policies say.

    Raises:
        UserError: a profile that cannot be read, or lacks the policies, or has networks of other
            shapes; without one, as soon as it is asked.
    """
    if not keys.profile:
        # Mode bench makes the drafter before it measures.
        raises = _unfitted
        return Controller("ltd", raises, size=raises, check_rows=raises, most_nodes=FOREVER)
    known = costs_lib.read(keys.profile, unit=costs_lib.NODES)
    policies = [kind.policy for costs in known.batches.values() for kind in costs[1:]]
    if not all(policies):
        raise UserError(f"the cost profile {keys.profile} has no policies of ltd; measure one anew")
    sizes = costs_lib.lengths(known)
    shapes = [[[x.shape for x in own] for own in policy] for policy in policies]
    if any(own != _shapes(len(sizes) - 1) for own in shapes):
        raise UserError(
            f"the cost profile {keys.profile} has policies of ltd with networks of other "
            "shapes; measure one anew"
        )
    return Controller(
        "ltd",
        ask=Bound(_ask, known),
        init=_init,
        update=_update,
        size=Bound(_size, known),
        check_rows=costs_lib.check_rows(known),
        most_nodes=sizes[-1],
        exact_nodes=True,
    )


def _shapes(sizes: int) -> list[list[tuple[int, ...]]]:
    """Those of the arrays of the two networks."""
    return [
        [(width, HIDDEN), (HIDDEN,), (HIDDEN, actions), (actions,)]
        for width, actions in ((CANDIDATES + 2, 1), (len(PLACES) + 2, sizes))
    ]


def _unfitted(*_: Any) -> Any:
    raise UserError(
        "control is 'ltd', and its policies were not fitted; give ltd:profile=FILE: "
        f"{costs_lib.MAKE}"
    )


def _init(context: Context) -> State:
    return State(jnp.asarray(context.sampling.greedy, bool), context.length.astype(jnp.int32))


def _update(state: Any, draft: Draft, verdict: Verdict) -> Any:
    return state.replace(length=state.length + verdict.count)


def _ask(known: Known, state: State, ahead: Ahead) -> tuple[Array, State]:
    values = _of_candidates(ahead, state.length)
    costs = costs_lib.known_of(known, len(state.length))
    answers = [apply(kind.policy[0], values)[:, 0] > 0 for kind in costs[1:]]
    return (jnp.asarray(ahead.depth) == 0) | jnp.where(state.greedy, *answers), state


def _size(known: Known, state: State, draft: Draft, log_prob: Array) -> tuple[Array, Array, State]:
    order, values = _of_nodes(draft, log_prob, state.length)
    costs = costs_lib.known_of(known, len(state.length))
    sizes = jnp.asarray(costs.lengths[1:], jnp.int32)
    counts = [sizes[jnp.argmax(apply(kind.policy[1], values), -1)] for kind in costs[1:]]
    return order, jnp.where(state.greedy, *counts), state


# What the policies read.


def _scaled(log_chance: Array, length: Array, depth: Array | int) -> Array:
    """f32[B,n+2]: log-probabilities, the depth and the length, of about the size of 1."""
    others = jnp.asarray(depth) / 10, length / 1000
    more = [jnp.broadcast_to(x, length.shape)[:, None] for x in others]
    scaled = jnp.maximum(log_chance, dynamic.LEAST) / 10
    return jnp.concatenate([scaled, *more], 1).astype(jnp.float32)


def _of_candidates(ahead: Ahead, length: Array) -> Array:
    """f32[B,F]: of the most probable paths that end in the next level."""
    logits = ahead.logits.astype(jnp.promote_types(ahead.logits.dtype, jnp.float32))
    best = sampling.top(jax.nn.log_softmax(logits), min(CANDIDATES, logits.shape[-1]))[0]
    path = jnp.where(ahead.valid[..., None], ahead.log_prob[..., None] + best, dynamic.LEAST)
    path = path.reshape(len(path), -1)
    path = jax.lax.top_k(path, min(CANDIDATES, path.shape[1]))[0]
    lacking = ((0, 0), (0, CANDIDATES - path.shape[1]))
    return _scaled(jnp.pad(path, lacking, constant_values=dynamic.LEAST), length, ahead.depth)


def _of_nodes(draft: Draft, log_prob: Array, length: Array) -> tuple[Array, Array]:
    """The nodes best first i32[B,N], and of the most probable paths of the tree f32[B,G]."""
    order, chance = dynamic.by_chance(log_prob, draft.parents, draft.valid)
    beyond = max(0, PLACES[-1] + 1 - chance.shape[1])
    path = jnp.log(jnp.pad(chance, ((0, 0), (0, beyond))))[:, PLACES]
    return order, _scaled(path, length, _controller.drafted(draft))


def apply(network: Any, values: Array) -> Array:
    """f32[...,A]: a network of one hidden layer."""
    weights, bias, out, last = network
    return jax.nn.relu(values @ weights + bias) @ out + last


# Recorded rounds, and the fit.


def recorder(depth: int, nodes: int) -> Controller:
    """Whole trees of as many levels as its state says; the state has what the policies read."""
    return Controller(
        "recorder",
        ask=Bound(_record_candidates, depth),
        init=Bound(_begin, depth, nodes),
        update=_record_accepted,
        limit=_deepest,
        size=_record_nodes,
        most_nodes=nodes,
    )


def _begin(depth: int, nodes: int, context: Context) -> Recorded:
    shape = context.length.shape
    return Recorded(
        jnp.full(shape, depth, jnp.int32),
        context.length.astype(jnp.int32),
        jnp.zeros((*shape, depth, CANDIDATES + 2), jnp.float32),
        jnp.zeros((*shape, len(PLACES) + 2), jnp.float32),
        jnp.zeros((*shape, nodes), bool),
    )


_deepest = operator.attrgetter("deepest")


def _record_candidates(depth: int, state: Recorded, ahead: Ahead) -> tuple[Array, Recorded]:
    here = (jnp.arange(depth) == jnp.asarray(ahead.depth))[:, None]
    own = _of_candidates(ahead, state.length)[:, None]
    every = jnp.ones(state.length.shape, bool)
    return every, state.replace(candidates=jnp.where(here, own, state.candidates))


def _record_nodes(state: Recorded, draft: Draft, log_prob: Array) -> tuple[Array, Array, Recorded]:
    order, values = _of_nodes(draft, log_prob, state.length)
    every = jnp.full(state.length.shape, order.shape[1], jnp.int32)
    return order, every, state.replace(nodes=values)


def _record_accepted(state: Recorded, draft: Draft, verdict: Verdict) -> Recorded:
    nodes = jnp.arange(state.accepted.shape[1])
    state = state.replace(accepted=(verdict.path[..., None] == nodes).any(1))
    return _update(state, draft, verdict)


def value(policy: Any, rounds: Rounds, times: Array) -> tuple[Array, Array]:
    """The expected tokens f32[M] and times f32[M] of rounds, by two stochastic policies.

    ``times`` f32[D,S] are those of a round with a tree of so many levels, of which so many nodes
    are verified.
    """
    goes = apply(policy[0], jnp.asarray(rounds.candidates[:, 1:]))[..., 0]
    begin, end = ((0, 0), (1, 0)), ((0, 0), (0, 1))
    further = jnp.pad(jnp.cumsum(jax.nn.log_sigmoid(goes), 1), begin)
    ends = jnp.exp(further + jnp.pad(jax.nn.log_sigmoid(-goes), end))  # [M,D]
    sizes = jax.nn.softmax(apply(policy[1], jnp.asarray(rounds.nodes)))  # [M,D,S]
    both = ends[..., None] * sizes
    return (both * jnp.asarray(rounds.tokens)).sum((1, 2)), (both * times).sum((1, 2))


def chosen(policy: Policy, rounds: Rounds) -> tuple[np.ndarray, np.ndarray]:
    """The levels, from 1, and the number of the size, i64[M] each, that decoding takes."""
    goes = np.asarray(apply(policy[0], jnp.asarray(rounds.candidates[:, 1:])))[..., 0] > 0
    levels = goes.cumprod(1).sum(1)
    sizes = np.asarray(apply(policy[1], jnp.asarray(rounds.nodes))).argmax(-1)
    return 1 + levels, sizes[np.arange(len(levels)), levels]


def rate(policy: Policy, rounds: Rounds, times: np.ndarray) -> float:
    """Tokens of these rounds over their time, with what decoding takes."""
    levels, sizes = chosen(policy, rounds)
    tokens = rounds.tokens[np.arange(len(levels)), levels - 1, sizes]
    return float(tokens.sum() / times[levels - 1, sizes].sum())


def fit(
    rounds: Rounds, times: np.ndarray, report: Callable[[str], None] = lambda message: None
) -> Policy:
    """The two policies with the most tokens per second in recorded rounds.

    The last fifth of the rounds is held out. Of the policies after every 50 steps, the one with the
    highest rate there is taken. ``times`` f[D,S] is as in ``value``. Raises UserError for too few
    rounds.
    """
    if len(rounds.tokens) < LEAST_ROUNDS:
        raise UserError(
            f"ltd is fitted to recorded rounds, and there are {len(rounds.tokens)}; at least "
            f"{LEAST_ROUNDS} are needed: give more warm_prompts, or more tokens to each"
        )
    held = len(rounds.tokens) // HELD_OUT
    seen, kept = (Rounds(*(x[part] for x in rounds)) for part in (np.s_[:-held], np.s_[-held:]))
    keys = jax.random.split(jax.random.key(0), 2)
    policy: Any = tuple(
        (jax.random.normal(each, first) / first[0] ** 0.5, *map(jnp.zeros, others))
        for each, (first, *others) in zip(keys, _shapes(times.shape[1]), strict=True)
    )
    step = optax.adamw(RATE, weight_decay=DECAY)
    timed = jnp.asarray(times, jnp.float32)

    def lost(policy: Any) -> Array:
        tokens, spent = value(policy, seen, timed)
        return jnp.log(spent.sum()) - jnp.log(tokens.sum())

    def turn(carry: Any, _: Any) -> tuple[Any, None]:
        policy, moments = carry
        change, moments = step.update(jax.grad(lost)(policy), moments, policy)
        return (optax.apply_updates(policy, change), moments), None

    turns = jax.jit(lambda carry: jax.lax.scan(turn, carry, length=STEPS)[0])
    carry, found = (policy, step.init(policy)), []
    for _ in range(LOOKS):
        carry = turns(carry)
        own = jax.tree.map(np.asarray, carry[0])
        found.append((rate(own, kept, times), own))
    best, policy = max(found, key=lambda each: each[0])
    fixed = seen.tokens.sum(0) / times
    level, size = np.unravel_index(fixed.argmax(), fixed.shape)
    same = kept.tokens[:, level, size].mean() / times[level, size]
    report(
        f"ltd: {best:.2f} tokens in the time of a plain round in held-out rounds; the best fixed "
        f"tree, {level + 1} levels: {same:.2f}"
    )
    return policy
