"""What goodput knows in a round, and the draft length that follows from it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.control import costs as costs_lib
from specjax.control.costs import Costs, Profile

# A row that needs a share x less time than the last one counts exp(-x EARLY) in a lookup's choice.
EARLY = 10.0


class State(struct.PyTreeNode):
    """What is kept from round to round."""

    # bool[B] the rows without sampling. What they cost is looked up in every round, because a state
    # can be put into a batch of another size.
    greedy: jax.Array
    # f32[B,K] tokens that were accepted, and tested, at each depth; later ones count more.
    passed: jax.Array
    tested: jax.Array
    # f32[B,2] rounds with a draft, and rounds that could have one; later ones count more.
    found: jax.Array
    left: jax.Array  # f32[B] tokens that the row may still write, before the ``idle`` rounds
    live: jax.Array  # bool[B] the rows that are not finished
    rows: jax.Array  # i32[B] how many rows the batch had when the length was chosen
    length: jax.Array  # i32[B] of the next draft, equal in all rows
    idle: jax.Array  # i32[B] rounds since a draft was made, equal in all rows
    tries: jax.Array  # bool[B] whether the next draft is a trial, equal in all rows
    failed: jax.Array  # i32[B] trials that gave no draft since the last one, equal in all rows
    # What follows from the numbers above.
    rates: jax.Array  # f32[B,K] the acceptance of each row at each depth
    pace: jax.Array  # f32[B] tokens in the time of a round without a draft, with the best length
    early: jax.Array  # f32[B] how long before the last row each one is finished, as a share
    due: jax.Array  # i32[B] the rounds without a draft that pay for a trial, equal in all rows


class Setup(NamedTuple):
    """The static settings."""

    known: Costs | Profile
    weight: float
    memory: float
    explore: float
    rows: str

    def costs(self, state: State) -> Costs:
        """The costs of the batch."""
        return costs_lib.known_of(self.known, len(state.live))

    def each(self, field: str, state: State) -> jax.Array:
        """f32[B,n]: a field of ``RoundCosts`` by row."""
        return self.costs(state).each(field, state.greedy)


class Choice(NamedTuple):
    """What the numbers of a moment say."""

    best: jax.Array  # i32[] the best length
    trial: jax.Array  # i32[] the best one above 0
    # f32[] what the trial costs beyond a round without a draft, and f32[] for each round before it.
    price: jax.Array
    missed: jax.Array
    pace: jax.Array  # f32[B] tokens in the time of a round without a draft, with the best length
    early: jax.Array  # f32[B] how long before the last row each one is finished, as a share


def choose(setup: Setup, state: State) -> Choice:
    """The best length for all rounds from now on."""
    times = _mean(state, setup.each("times", state))
    accepted = _accepted(setup, state, state.rates)
    # In a round in which no row has a draft, none is verified; with length 0 none is looked for.
    share = state.found[:, 0] + setup.weight * setup.each("finds", state)[:, 0]
    share = share / (state.found[:, 1] + setup.weight)
    drafts = 1 - jnp.prod(jnp.where(state.live, 1 - share, 1))
    empty = _mean(state, setup.each("empty", state))[0]
    spends = (empty + drafts * (times - empty)).at[0].set(1)
    rate = (1 + share[:, None] * accepted) / spends
    live = state.live[:, None]
    left = jnp.where(live, jnp.maximum(state.left, 1)[:, None], 0)
    left = left / jnp.maximum(left.max(), 1)
    spent = left / rate
    value = (rate * live).sum(0) if setup.rows == "open" else -spent.max(0)
    best, trial = jnp.argmax(value), 1 + jnp.argmax(value[1:])
    lengths = jnp.asarray(setup.costs(state).lengths, jnp.int32)
    last = jnp.maximum(spent[:, best].max(), 1e-6)
    early = 1 - spent[:, best] / last
    # Each trial is paid for, those that found nothing too.
    trials = state.failed[0] + 1
    price = trials * (spends[trial] - 1)
    missed = trials * _mean(state, setup.each("missed", state))[0]
    return Choice(lengths[best], lengths[trial], price, missed, rate[:, best], early)


def of_found(setup: Setup, state: State, reach: jax.Array) -> jax.Array:
    """i32[] the best length for this round, for drafts of so many levels i32[B].

    A round takes time from the rounds after it, so tokens are compared with those that the rows
    emit in the same time on average. The most tokens per second of this round alone would be fewer
    in the whole text.
    """
    costs = setup.costs(state)
    rates = jnp.where(jnp.arange(costs.longest) < reach[:, None], state.rates, 0)
    counts = state.live.astype(jnp.float32)
    if setup.rows == "closed":
        counts = counts * jnp.exp(-EARLY * state.early)
    tokens = counts[:, None] * (1 + _accepted(setup, state, rates))
    # The search is over: without a draft the round costs what such rounds cost.
    times = _mean(state, setup.each("times", state))
    times = times.at[0].set(_mean(state, setup.each("empty", state))[0])
    best = jnp.argmax(tokens.sum(0) - (counts * state.pace).sum() * times)
    return jnp.asarray(costs.lengths, jnp.int32)[best]


def _mean(state: State, values: jax.Array) -> jax.Array:
    """f32[n]: the mean of f32[B,n] over live rows; greedy and sampled rows may differ."""
    live = state.live[:, None]
    return (values * live).sum(0) / jnp.maximum(live.sum(), 1)


def rates_of(setup: Setup, state: State) -> jax.Array:
    """f32[B,K]: the acceptance of each row at each depth."""
    live, weight = state.live[:, None], setup.weight
    passed, tested = (state.passed * live).sum(0), (state.tested * live).sum(0)
    batch = (passed + weight * setup.each("acceptance", state)) / (tested + weight)
    return (state.passed + weight * batch) / (state.tested + weight)


def _accepted(setup: Setup, state: State, rates: jax.Array) -> jax.Array:
    """f32[B,A]: the expected accepted tokens of a draft of each length."""
    accepted = jnp.pad(jnp.cumsum(jnp.cumprod(rates, -1), -1), ((0, 0), (1, 0)))
    return accepted[:, np.array(setup.costs(state).lengths)]


def spread(state: State, value: jax.Array) -> jax.Array:
    """The value in all rows."""
    return jnp.broadcast_to(value, state.length.shape)
