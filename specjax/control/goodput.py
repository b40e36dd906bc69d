"""The draft length of the batch with the most tokens per second: SmartSpec's goodput.

Liu et al. 2024 (2406.14066, sections 4 and 5; later TurboSpec). Before every round, the tokens that
the rows are expected to emit with a draft of k tokens are divided by the time of such a round, and
the best k is taken, 0 among them. The tokens follow from the acceptance at each depth: that of the
row's own rounds, in which later rounds count more, towards that of the batch, and this towards the
acceptance known before. The times are measured (``profile``), or two numbers. The acceptance rate
alone cannot choose: under load every verified token costs time.

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

The length depends on all rows, so the noise of a row's drafts does too; its output law does not. On
a mesh, the rows of a device share one length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import one_of
from specjax.control import _counts
from specjax.control import costs as costs_lib
from specjax.control._goodput import Choice, Setup, State, choose, of_found, rates_of, spread
from specjax.control._types import FOREVER, Controller, length_of
from specjax.control.costs import Costs, Profile
from specjax.types import Context, Draft, Lasting, Verdict

REFERENCE = "liu2024optimizing"

LIMITS = True

ROWS = ("closed", "open")
# Tokens left in rows whose limit is not known.
UNKNOWN = 1e6


def make(
    *,
    profile: str = "",
    most: int = 8,
    draft: float = 0.1,
    verify: float = 0.05,
    acceptance: float = costs_lib.ACCEPTANCE,
    weight: float = 4.0,
    memory: float = 0.95,
    explore: float = 0.01,
    rows: str = "closed",
) -> Controller:
    """The length with the most expected tokens per second.

    Args:
        profile: a file that mode bench wrote into profiles/ of its workdir; "": the next four keys.
        most: the longest draft.
        draft, verify: what drafting and verifying one more token costs, in units of a round without
            a draft.
        acceptance: the share of tokens that is accepted if those before were, as first assumed.
        weight: of the acceptance known before, in tested tokens, and of the batch for each row.
        memory: how much a tested token counts against the next one.
        explore: the share of the time that is spent on trials while nothing is drafted.
        rows: "closed" (the loop ends with its slowest row) or "open" (finished rows are replaced).

    Raises:
        UserError: a number out of range, a profile that cannot be read or lacks the batch size, an
            unknown ``rows``.
    """
    linear = costs_lib.linear(most, draft, verify, acceptance)
    known = costs_lib.read(profile) if profile else linear
    return of_costs(known, weight, memory, explore, rows)


def of_costs(
    known: Costs | Profile,
    weight: float = 4.0,
    memory: float = 0.95,
    explore: float = 0.01,
    rows: str = "closed",
) -> Controller:
    """The controller for these costs; see ``make``."""
    _counts.positive("goodput's weight", weight)
    _counts.share("goodput's memory", memory)
    _counts.share("goodput's explore", explore)
    one_of("goodput's rows", rows, ROWS)
    setup = Setup(known, weight, memory, explore, rows)
    return Controller(
        "goodput",
        init=Bound(_init, setup),
        update=Bound(_update, setup),
        limit=length_of,
        within=Bound(_within, setup),
        pause=Lasting(Bound(_pause, setup), Bound(_after, setup)),
        check_rows=costs_lib.check_rows(known),
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
        jnp.asarray(greedy, bool),
        jnp.zeros_like(prior),
        jnp.zeros_like(prior),
        jnp.zeros((batch, 2), jnp.float32),
        left,
        jnp.ones((batch,), bool) if context.done is None else ~context.done,
        zeros,
        zeros,
        zeros,
        jnp.zeros((batch,), bool),
        zeros,
        prior,
        jnp.ones((batch,), jnp.float32),
        jnp.zeros((batch,), jnp.float32),
        zeros,
    )
    return _next(setup, state, jnp.int32(0))


def _within(setup: Setup, state: State, reach: jax.Array) -> jax.Array:
    """The best length for drafts of which the rows have so many levels; a trial stays as it is."""
    best = spread(state, of_found(setup, state, reach))
    return jnp.where(state.tries, state.length, best)


def _update(setup: Setup, state: State, draft: Draft, verdict: Verdict) -> State:
    drafted, accepted = _counts.drafted(draft), _counts.accepted(verdict)
    depth, live = jnp.arange(setup.costs(state).longest), verdict.count > 0
    tested = depth < jnp.minimum(accepted + 1, drafted)[:, None]
    keep = jnp.where(tested, setup.memory, 1)
    any_draft, asked = (drafted > 0).any(), live & (state.length > 0)
    found = jnp.stack([asked & (drafted > 0), asked], 1)
    forget = jnp.where(asked, setup.memory, 1)[:, None]
    state = state.replace(
        passed=(keep * state.passed + (tested & (depth < accepted[:, None]))).astype(jnp.float32),
        tested=(keep * state.tested + tested).astype(jnp.float32),
        found=(forget * state.found + found).astype(jnp.float32),
        left=jnp.where(any_draft, state.left - state.idle - verdict.count, state.left),
        live=live,
        failed=jnp.where(any_draft, 0, state.failed + state.tries),
    )
    return _next(setup, state, jnp.where(any_draft, 0, state.idle[0] + 1))


def _next(setup: Setup, state: State, idle: jax.Array) -> State:
    """The state for the next round, after so many rounds i32[] without a draft."""
    state, choice = _chosen(setup, state)
    tries = (choice.best == 0) & (idle >= state.due[0])
    return state.replace(
        length=spread(state, jnp.where(tries, choice.trial, choice.best)),
        rows=jnp.full_like(state.rows, len(state.live)),
        idle=spread(state, idle),
        tries=spread(state, tries),
    )


def _chosen(setup: Setup, state: State) -> tuple[State, Choice]:
    """The best length, and the state with what follows from its numbers."""
    state = state.replace(rates=rates_of(setup, state))
    choice = choose(setup, state)
    due = jnp.int32(FOREVER)
    if setup.explore:
        # Every round without a draft saves so much, less what the drafter reads after it.
        saves = setup.explore - choice.missed
        rounds = jnp.ceil(choice.price / jnp.maximum(saves, 1e-9))
        due = jnp.where(saves > 0, jnp.clip(rounds, 1, FOREVER), FOREVER).astype(jnp.int32)
    state = state.replace(pace=choice.pace, early=choice.early, due=spread(state, due))
    return state, choice


def _pause(setup: Setup, state: State, live: jax.Array) -> jax.Array:
    rounds = jnp.maximum(state.due[0] - state.idle[0], 1)
    # Another choice follows where the last one was made for another batch, or for other live rows.
    same = (live == state.live) & (state.rows == len(state.live))
    return spread(state, jnp.where(same.all(), rounds, 1))


def _after(setup: Setup, state: State, rounds: jax.Array) -> State:
    return _next(setup, state.replace(live=rounds > 0), state.idle[0] + rounds.max())
