"""A draft length per row and round, chosen by what earlier rounds of that length gained.

The lengths, 0 among them, are the arms of a bandit (BanditSpec, Hou et al. 2025, 2505.15141). The
gain of a round is the number of the row's tokens over the time of the round, which is that of the
longest draft in the batch; the time of each length is measured (``profile``), or two numbers, in
units of a round without a draft. Policies:

- ``ucb``: the arm with the highest mean gain plus ``width`` sqrt(ln rounds / rounds of the arm);
- ``exp3``: an arm drawn in proportion to exponential weights of the gains, mixed with ``width`` of
  the uniform distribution.

EXP3's noise is a function of the row's prompt and of the number of rounds. A length depends on
committed text alone, of all rows: the noise that a row's drafts consume does too, and the law of
its output does not. On a mesh, the rows of a device count; inside a nested drafter, the rows that
its part of the round belongs to.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax import declare, tree
from specjax.bound import Bound
from specjax.control import _controller
from specjax.control import costs as costs_lib
from specjax.control._controller import Controller
from specjax.control.costs import Known
from specjax.declare import key
from specjax.types import Array, Context, Draft, Verdict

REFERENCE = "hou2025banditspec"

POLICIES = ("ucb", "exp3")

LIMITS = True


class State(struct.PyTreeNode):
    """What a row keeps from round to round."""

    greedy: Array  # bool[B] the rows without sampling
    rounds: Array  # f32[B,A] of each arm
    # f32[B,A] ucb: the sum of the gains of each arm; exp3: the logs of the weights
    score: Array
    arm: Array  # i32[B] of the next round
    share: Array  # f32[B] the probability with which exp3 drew the arm
    seed: Array  # u32[B] of the noise, from the prompt


class Keys(declare.Keys, owner="bandit's "):
    """The keys of ``bandit``."""

    policy: str = key("ucb", '"ucb" or "exp3"', choices=POLICIES)
    profile: str = key("", f'{costs_lib.PROFILE}; "": the next keys')
    most: int | None = key(
        None,
        "the longest draft; the lengths are 0, 1, 2, 3, 4, 6, 8, 12, 16 up to it; None: that of "
        "the profile, or 8",
    )
    draft: float | None = costs_lib.cost_key("drafting one more token", costs_lib.DRAFT)
    verify: float | None = costs_lib.verify_key(costs_lib.LEVELS)
    width: float = key(0.2, "how much is explored", above=0, most=1)


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """One of the lengths of the costs, for each row.

    Raises:
        UserError: an unknown policy, a number out of range, a profile that cannot be read.
    """
    known = costs_lib.known(keys, 8)
    return Controller(
        f"bandit:{keys.policy}",
        init=Bound(_init, known, keys),
        update=Bound(_update, known, keys),
        limit=Bound(_limit, known),
        check_rows=costs_lib.check_rows(known),
        lengths=costs_lib.lengths(known),
        shared=True,
    )


def _init(known: Known, keys: Keys, context: Context) -> State:
    batch = len(context.length)
    place = jnp.arange(context.tokens.shape[1])
    real = place < context.length[:, None]
    # Any function of the prompt that differs between most prompts.
    mixed = context.tokens.astype(jnp.uint32) * (2 * place.astype(jnp.uint32) + 1)
    mixed = mixed * jnp.uint32(2654435761)
    seed = jnp.where(real, mixed, 0).sum(-1, dtype=jnp.uint32)
    zeros = jnp.zeros((batch, len(costs_lib.known_of(known, batch).lengths)), jnp.float32)
    nothing = jnp.zeros((batch,), jnp.int32)
    ones, greedy = jnp.ones((batch,), jnp.float32), jnp.asarray(context.sampling.greedy, bool)
    return _next(keys, State(greedy, zeros, zeros, nothing, ones, seed))


def _limit(known: Known, state: State) -> Array:
    return jnp.asarray(costs_lib.known_of(known, len(state.arm)).lengths, jnp.int32)[state.arm]


def _update(known: Known, keys: Keys, state: State, draft: Draft, verdict: Verdict) -> State:
    costs = costs_lib.known_of(known, len(state.arm))
    times, empty = (costs.each(name, state.greedy) for name in ("times", "empty"))
    # Gains are divided by the highest one that any length can have.
    best = ((1 + jnp.asarray(costs.lengths)) / times).max(-1)
    # The round took the time of its longest draft, which may be shorter than the arm's length.
    live, drafted, _ = _controller.of_round(draft, verdict)
    drafted = drafted.max()
    time = times[:, costs.place(drafted)]
    asked = (live & (_limit(known, state) > 0)).any()
    time = jnp.where((drafted == 0) & asked, empty[:, 0], time)
    # Where another drafter wrote, only the length 0 is known: it would have given one token.
    idle = ~live & (_limit(known, state) == 0)
    gain = jnp.where(idle, 1, verdict.count / time) / best
    here = jax.nn.one_hot(state.arm, len(costs.lengths), dtype=jnp.float32)
    rounds = state.rounds + here
    if keys.policy == "exp3":
        gain = keys.width / len(costs.lengths) * gain / state.share
    new = _next(keys, state.replace(rounds=rounds, score=state.score + here * gain[:, None]))
    return tree.where_rows(live | idle, new, state)


def _next(keys: Keys, state: State) -> State:
    """The state with the arm of the next round."""
    total = state.rounds.sum(-1)
    if keys.policy == "ucb":
        mean = state.score / jnp.maximum(state.rounds, 1)
        more = jnp.sqrt(jnp.log(jnp.maximum(total, 2))[:, None] / jnp.maximum(state.rounds, 1))
        index = jnp.where(state.rounds > 0, mean + keys.width * more, jnp.inf)
        return state.replace(arm=jnp.argmax(index, -1).astype(jnp.int32))
    probs = (1 - keys.width) * jax.nn.softmax(state.score, -1) + keys.width / state.rounds.shape[1]

    def draw(seed: Array, count: Array, row: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), count), jnp.log(row))

    arm = jax.vmap(draw)(state.seed, total.astype(jnp.int32), probs).astype(jnp.int32)
    share = jnp.take_along_axis(probs, arm[:, None], -1)[:, 0].astype(jnp.float32)
    return state.replace(arm=arm, share=share)
