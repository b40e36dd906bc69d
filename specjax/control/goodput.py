"""The draft length of the batch with the most tokens per second: SmartSpec's goodput.

Liu et al. 2024 (2406.14066, sections 4 and 5; later TurboSpec). Before every round, the tokens that
the rows are expected to emit with a draft of k tokens are divided by the time of such a round, and
the best k is taken, 0 among them. The tokens follow from the acceptance at each depth: that of the
row's own rounds, in which later rounds count more, towards that of the other rows, and this towards
the acceptance known before. The times are measured (``profile``), or two numbers. The acceptance
rate alone cannot choose: under load every verified token costs time.

``rows="open"`` is the published sum over rows: finished rows are replaced at once, so every token
counts the same. The decode loop ends with its slowest row, and what other rows gain is lost. So
``rows="closed"`` takes the length with which the last row is finished first, by the tokens that
each row may still write.

A lookup finds a draft in some rows only, and knows it before the verification. Only these rows can
emit more than one token, so the length is then chosen again for the drafts that were found; with
``rows="closed"`` rows that will be finished early hardly count. Looking for a draft costs time too,
also where none is found: a profile has that time, and how often a row has a draft.

Where the best length is 0 nothing more would be learned. So a draft is tried from time to time: as
soon as ``explore`` times the rounds without a draft have paid for it, and for what a draft model
has to read of these rounds first: where that is more than ``explore``, and with ``explore=0``, it
never is.

Expectations can be wrong, so the time that drafts may lose is bounded. Each row has a bank:
``credit``, and 1 + ``slack`` for each of its tokens, less the time of all its rounds, in units of a
round without a draft. While a live row has less than 0, nothing is drafted and nothing is tried. So
with ``rows="closed"`` a row of n tokens takes at most n (1 + ``slack``) + ``credit`` + c - 1, where
c is the time of the longest round: ``credit`` from the start, and c - 1 from the last round with a
draft. The time of a loop is that of its longest row. With ``rows="open"`` the sum over live rows
decides, and the same bound holds for the mean row of a batch whose rows stay the same. Times are
those of the profile, or of the two numbers. What a draft model has to read after rounds without a
draft is counted in these rounds. With ``slack=1`` there is no bound.

The length depends on all rows, so the noise of a row's drafts does too; its output law does not. On
a mesh, the rows of a device share one length.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import declare, tree
from specjax.bound import Bound
from specjax.control import _controller
from specjax.control import costs as costs_lib
from specjax.control._controller import FOREVER, Controller, Setup, length_of, live_mean
from specjax.control.costs import Known
from specjax.declare import key, share
from specjax.types import Array, Context, Draft, Lasting, Verdict

REFERENCE = "liu2024optimizing"

LIMITS = True

ROWS = ("closed", "open")
# Tokens left in rows whose limit is not known.
UNKNOWN = 1e6
# A row that needs a share x less time than the last one counts exp(-x EARLY) in a lookup's choice.
EARLY = 10.0
# A bank so little below 0 counts as 0, because its sums are rounded.
ROUNDING = 1e-4


class State(struct.PyTreeNode):
    """What is kept from round to round."""

    # bool[B] the rows without sampling. What they cost is looked up in every round, because a state
    # can be put into a batch of another size.
    greedy: Array
    # f32[B,K] tokens that were accepted, and tested, at each depth; later ones count more.
    passed: Array
    tested: Array
    # f32[B,2] rounds with a draft, and rounds that could have one; later ones count more.
    found: Array
    left: Array  # f32[B] tokens that the row may still write, before the ``idle`` rounds
    live: Array  # bool[B] the rows that are not finished
    rows: Array  # i32[B] how many rows the batch had when the length was chosen
    length: Array  # i32[B] of the next draft, equal in all rows
    # f32[B] the time that drafts may still lose in the row, before the ``idle`` rounds
    bank: Array
    idle: Array  # i32[B] rounds of the row since a draft was made, or since it began
    tries: Array  # bool[B] whether the next draft is a trial, equal in all rows
    failed: Array  # i32[B] trials that gave no draft since the last one, equal in all rows
    # What follows from the numbers above.
    rates: Array  # f32[B,K] the acceptance of each row at each depth
    pace: Array  # f32[B] tokens in the time of a round without a draft, with the best length
    early: Array  # f32[B] how long before the last row each one is finished, as a share
    due: Array  # i32[B] the rounds without a draft that pay for a trial, equal in all rows


class Keys(declare.Keys, owner="goodput's "):
    """The keys of ``goodput``."""

    profile: str = key("", f'{costs_lib.PROFILE}; "": the next keys')
    most: int | None = key(None, "the longest draft; None: that of the profile, or 8")
    draft: float | None = costs_lib.cost_key("drafting one more token", costs_lib.DRAFT)
    verify: float | None = costs_lib.verify_key(costs_lib.LEVELS)
    acceptance: float | None = key(
        None,
        "the share of tokens that is accepted if those before were, as first assumed; None: that "
        f"of the profile, or {costs_lib.ACCEPTANCE:g}",
    )
    weight: float = key(
        16.0,
        "of the acceptance known before, in tested tokens, and of the other rows for each row",
        above=0,
    )
    memory: float = share(0.95, "how much a tested token counts against the next one")
    explore: float = share(0.01, costs_lib.EXPLORE)
    rows: str = key(
        "closed",
        '"closed" (the loop ends with its slowest row) or "open" (finished rows are replaced)',
        choices=ROWS,
    )
    slack: float = share(
        0.02, "the share of plain decoding's time that drafts may lose; 1: no bound"
    )
    credit: float = key(
        2.0, "what drafts may lose besides, once in a text, in rounds without a draft", least=0
    )


def choose(setup: Setup, state: State) -> tuple[State, Array, Array]:
    """The best length for all rounds from now on, and the best one above 0, both i32[].

    The state has what follows from its numbers.
    """
    state = state.replace(rates=rates_of(setup, state))
    times = setup.mean("times", state)
    accepted = _accepted(setup, state, state.rates)
    # In a round in which no row has a draft, none is verified; with length 0 none is looked for.
    share = state.found[:, 0] + setup.keys.weight * setup.each("finds", state)[:, 0]
    share = share / (state.found[:, 1] + setup.keys.weight)
    drafts = 1 - jnp.prod(jnp.where(state.live, 1 - share, 1))
    empty = setup.mean("empty", state)[0]
    spends = (empty + drafts * (times - empty)).at[0].set(1)
    rate = (1 + share[:, None] * accepted) / spends
    live = state.live[:, None]
    left = jnp.where(live, jnp.maximum(state.left, 1)[:, None], 0)
    left = left / jnp.maximum(left.max(), 1)
    spent = left / rate
    value = (rate * live).sum(0) if setup.keys.rows == "open" else -spent.max(0)
    best, trial = jnp.argmax(value), 1 + jnp.argmax(value[1:])
    lengths = jnp.asarray(setup.costs(state).lengths, jnp.int32)
    last = jnp.maximum(spent[:, best].max(), 1e-6)
    early = 1 - spent[:, best] / last
    due = jnp.int32(FOREVER)
    if setup.keys.explore:
        # Each trial is paid for, those that found nothing too. Every round without a draft saves
        # so much, less what the drafter reads after it.
        trials = state.failed[0] + 1
        price = trials * (spends[trial] - 1)
        saves = setup.keys.explore - trials * setup.mean("missed", state)[0]
        rounds = jnp.ceil(price / jnp.maximum(saves, 1e-9))
        due = jnp.where(saves > 0, jnp.clip(rounds, 1, FOREVER), FOREVER).astype(jnp.int32)
    state = state.replace(pace=rate[:, best], early=early, due=spread(state, due))
    return state, lengths[best], lengths[trial]


def of_found(setup: Setup, state: State, reach: Array) -> Array:
    """i32[] the best length for this round, for drafts of so many levels i32[B].

    A round takes time from the rounds after it, so tokens are compared with those that the rows
    emit in the same time on average. The most tokens per second of this round alone would be fewer
    in the whole text.
    """
    costs = setup.costs(state)
    rates = jnp.where(jnp.arange(costs.longest) < reach[:, None], state.rates, 0)
    counts = state.live.astype(jnp.float32)
    if setup.keys.rows == "closed":
        counts = counts * jnp.exp(-EARLY * state.early)
    tokens = counts[:, None] * (1 + _accepted(setup, state, rates))
    # The search is over: without a draft the round costs what such rounds cost.
    times = setup.mean("times", state)
    times = times.at[0].set(setup.mean("empty", state)[0])
    best = jnp.argmax(tokens.sum(0) - (counts * state.pace).sum() * times)
    return jnp.asarray(costs.lengths, jnp.int32)[best]


def rates_of(setup: Setup, state: State) -> Array:
    """f32[B,K]: the acceptance of each row at each depth."""
    live, weight = state.live[:, None], setup.keys.weight
    passed, tested = (_controller.of_others(x * live) for x in (state.passed, state.tested))
    others = (passed + weight * setup.each("acceptance", state)) / (tested + weight)
    return (state.passed + weight * others) / (state.tested + weight)


def _accepted(setup: Setup, state: State, rates: Array) -> Array:
    """f32[B,A]: the expected accepted tokens of a draft of each length."""
    accepted = jnp.pad(jnp.cumsum(jnp.cumprod(rates, -1), -1), ((0, 0), (1, 0)))
    return accepted[:, np.array(setup.costs(state).lengths)]


def spread(state: State, value: Array) -> Array:
    """The value in all rows."""
    return jnp.broadcast_to(value, state.length.shape)


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """The length with the most expected tokens per second.

    Raises:
        UserError: a number out of range, a profile that cannot be read or lacks the batch size, an
            unknown ``rows``.
    """
    return of_costs(costs_lib.known(keys, 8), keys)


def of_costs(known: Known, keys: Keys) -> Controller:
    """The controller for these costs, and the keys that are not about costs; see ``make``."""
    setup = Setup(known, keys)
    return Controller(
        "goodput",
        init=Bound(_init, setup),
        update=Bound(_update, setup),
        limit=Bound(_limit, setup),
        within=Bound(_within, setup),
        pause=Lasting(Bound(_pause, setup), Bound(_after, setup)),
        check_rows=costs_lib.check_rows(known),
        lengths=costs_lib.lengths(known),
        shared=True,
    )


def _init(setup: Setup, context: Context) -> State:
    batch = len(context.length)
    costs, greedy = costs_lib.known_of(setup.known, batch), context.sampling.greedy
    prior, zeros = costs.each("acceptance", greedy), jnp.zeros((batch,), jnp.int32)
    left = jnp.full((batch,), UNKNOWN, jnp.float32)
    if context.limit is not None:
        left = (context.limit - context.length).astype(jnp.float32)
    state = State(
        greedy=jnp.asarray(greedy, bool),
        found=jnp.zeros((batch, 2), jnp.float32),
        left=left,
        live=~context.finished,
        tries=jnp.zeros((batch,), bool),
        rates=prior,
        early=jnp.zeros((batch,), jnp.float32),
        **dict.fromkeys(("passed", "tested"), jnp.zeros_like(prior)),
        pace=jnp.ones((batch,), jnp.float32),
        bank=jnp.full((batch,), setup.keys.credit, jnp.float32),
        **dict.fromkeys(("rows", "length", "idle", "failed", "due"), zeros),
    )
    return _next(setup, state)


def _limit(setup: Setup, state: State) -> Array:
    """No draft while it is not allowed: a row that was put in has a length of its own."""
    return jnp.where(_allowed(setup, state), length_of(state), 0)


def _within(setup: Setup, state: State, reach: Array) -> Array:
    """The best length for drafts of which the rows have so many levels; a trial stays as it is."""
    return jnp.where(state.tries, state.length, spread(state, of_found(setup, state, reach)))


def _update(setup: Setup, state: State, draft: Draft, verdict: Verdict) -> State:
    live, drafted, accepted = _controller.of_round(draft, verdict)
    depth, before = jnp.arange(setup.costs(state).longest), state
    tested = depth < jnp.minimum(accepted + 1, drafted)[:, None]
    keep = jnp.where(tested, setup.keys.memory, 1)
    any_draft, asked = (drafted > 0).any(), live & (_limit(setup, state) > 0)
    found = jnp.stack([asked & (drafted > 0), asked], 1)
    forget = jnp.where(asked, setup.keys.memory, 1)[:, None]
    state = state.replace(
        passed=(keep * state.passed + (tested & (depth < accepted[:, None]))).astype(jnp.float32),
        tested=(keep * state.tested + tested).astype(jnp.float32),
        found=(forget * state.found + found).astype(jnp.float32),
        left=jnp.where(any_draft, state.left - state.idle - verdict.count, state.left),
        live=live,
        failed=jnp.where(any_draft, 0, state.failed + state.tries),
    )
    # A round without a draft is one of the ``idle`` rounds, which count as 1.
    gain = _idle_gain(setup, state) * state.idle + (1 + setup.keys.slack) * verdict.count
    gain = jnp.where(any_draft, gain, 1) - _time(setup, state, drafted.max(), asked.any())
    # Inside another drafter, a row without tokens of this one has them of others.
    gain = jnp.where(live, gain, _idle_gain(setup, state) * state.idle * any_draft)
    state = state.replace(
        bank=(state.bank + gain).astype(jnp.float32), idle=jnp.where(any_draft, 0, state.idle + 1)
    )
    # Nothing is learned from a round that another drafter wrote in all rows; a pause goes on in it.
    paused = _next(setup, before.replace(idle=before.idle + 1))
    other = tree.where_rows((_limit(setup, before) > 0).any(), before, paused)
    return tree.where_rows(live.any(), _next(setup, state), other)


def _time(setup: Setup, state: State, drafted: Array, asked: Array) -> Array:
    """f32[]: the time of a round whose longest draft has so many tokens i32[]."""
    index = setup.costs(state).place(drafted)
    bare = jnp.where(asked, setup.mean("empty", state)[0], 1)
    return jnp.where(drafted > 0, setup.mean("times", state)[index], bare)


def _idle_gain(setup: Setup, state: State) -> Array:
    """f32[]: what a round without a draft adds to a bank."""
    return setup.keys.slack - setup.mean("missed", state)[0]


def _least(setup: Setup, state: State) -> Array:
    """f32[]: the bank that decides whether drafts are allowed; with open rows the mean one."""
    banks = state.bank + _idle_gain(setup, state) * state.idle
    if setup.keys.rows == "open":
        return live_mean(state.live, banks[:, None])[0]
    return jnp.where(state.live, banks, jnp.inf).min()


def _allowed(setup: Setup, state: State) -> Array:
    """bool[]: whether the next round may have a draft."""
    return (setup.keys.slack == 1) | (_least(setup, state) >= -ROUNDING)


def _next(setup: Setup, state: State) -> State:
    """The state for the next round."""
    state, best, trial = choose(setup, state)
    allowed = _allowed(setup, state)
    tries = allowed & (best == 0) & (state.idle.max() >= state.due[0])
    length = spread(state, jnp.where(tries, trial, jnp.where(allowed, best, 0)))
    rows = jnp.full_like(state.rows, len(state.live))
    return state.replace(length=length, rows=rows, tries=spread(state, tries))


def _pause(setup: Setup, state: State, live: Array) -> Array:
    rounds = state.due[0] - state.idle.max()
    # So many bring the bank back to 0.
    gain = _idle_gain(setup, state)
    back = jnp.ceil(-(_least(setup, state) + ROUNDING) / jnp.maximum(gain, 1e-9))
    back = jnp.where(gain > 0, jnp.clip(back, 1, FOREVER), FOREVER).astype(jnp.int32)
    rounds = jnp.maximum(jnp.where(_allowed(setup, state), rounds, back), 1)
    # Another choice follows where the last one was made for another batch, or for other live rows.
    same = (live == state.live) & (state.rows == len(state.live))
    return spread(state, jnp.where(same.all(), rounds, 1))


def _after(setup: Setup, state: State, rounds: Array) -> State:
    live, idle = rounds > 0, state.idle + rounds.max()
    return _next(setup, state.replace(live=live, idle=idle))
