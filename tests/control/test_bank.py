"""The bound of ``goodput``: how much time drafts may lose, whatever they are."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import control
from specjax.control import Controller, costs, goodput
from specjax.sampling import make_sampling
from specjax.types import Context, Draft, Verdict

pytestmark = pytest.mark.fast

LENGTHS, TIMES = (0, 1, 2, 4), (1.0, 1.25, 1.45, 1.9)
EMPTY, MISSED, SLACK = 1.15, 0.004, 0.02
MOST = LENGTHS[-1]
# Rounds of a pause that nothing ends.
FOREVER = 1 << 30


def made(slack, *, empty=EMPTY, missed=MISSED, share=0.9, **more) -> Controller:
    """A controller that expects this share to be accepted; with a high weight it learns nothing."""
    measured = costs.RoundCosts(TIMES, (share,) * MOST, empty=empty, missed=missed)
    usual = {"weight": 1e4, "memory": 1.0, "credit": 1.0}
    keys = goodput.Keys(slack=slack, **usual | more)
    return goodput.of_costs(costs.Costs(LENGTHS, measured, measured), keys)


def context(rows):
    """A context of so many rows."""
    tokens = jnp.zeros((rows, 3), jnp.int32)
    return Context(tokens, jnp.full((rows,), 3), make_sampling(rows, 1.0))


def begun(own, rows):
    """The state before the first round."""
    return jax.jit(lambda: own.init(context(rows)))()


@functools.partial(jax.jit, static_argnums=0)
def updated(own, state, drafted, accepted, count):
    """The state after a round of chains."""
    place = jnp.arange(MOST)
    draft = Draft(jnp.zeros((len(count), MOST), jnp.int32), place < drafted[:, None])
    path = jnp.where(place < accepted[:, None], place, -1)
    tokens = jnp.zeros((len(count), MOST + 1), jnp.int32)
    return own.update(state, draft, Verdict(tokens, count, path))


class Round(NamedTuple):
    """A round, or several without a draft."""

    rounds: Any  # i32[R]
    asked: Any  # bool[R] whether a draft was asked for
    drafted: Any  # i32[R] the longest draft
    emitted: Any  # i32[R,B] tokens; 0 in finished rows


def played(own: Controller, found, accepted, total, *, pauses=True) -> Round:
    """Rounds in which i32[R,B] tokens could be drafted, and would be accepted.

    ``total`` i32[B]: the tokens of the rows. With ``pauses`` rounds without a draft go by at once.
    """
    total = jnp.asarray(total)
    pause, limit = own.pause, own.limit
    assert pause is not None and limit is not None

    def one(carry, given):
        state, emitted = carry
        reach, would = given
        live = emitted < total
        reach = jnp.where(live, reach, 0)
        length = control.longest(own, state, reach)
        asked = (live & (limit(state) > 0)).any()
        assert length is not None
        drafted = jnp.minimum(reach, length)
        right = jnp.minimum(would, drafted)
        count = jnp.where(live, jnp.minimum(right + 1, total - emitted), 0)
        new, rounds = updated(own, state, drafted, right, count), jnp.int32(1)
        if pauses:
            lasting = jnp.where(live, pause.rounds(state, live), FOREVER).min()
            lasting = jnp.minimum(lasting, jnp.where(live, total - emitted, FOREVER).min())
            rounds = jnp.where(asked, 1, lasting)
            rested = pause.after(state, rounds * live)
            new = jax.tree.map(lambda a, b: jnp.where(asked, a, b), new, rested)
            count = jnp.where(asked, count, rounds * live)
        live = live.any()
        return (new, emitted + count), Round(rounds * live, asked, drafted.max(), count)

    given = jnp.asarray(found), jnp.asarray(accepted)
    start = begun(own, len(total)), jnp.zeros_like(total)
    return Round(*map(np.asarray, jax.jit(lambda: jax.lax.scan(one, start, given))()[1]))


def clock(rounds: Round, empty=EMPTY, missed=MISSED) -> np.ndarray:
    """f64[R]: the time after each of them, in rounds without a draft."""
    spent, idle, now = [], 0, 0.0
    for number, asked, drafted in zip(*rounds[:3], strict=True):
        if drafted:
            now += TIMES[next(i for i, n in enumerate(LENGTHS) if n >= drafted)] + idle * missed
            idle = 0
        else:
            now += empty if asked else number
            idle += number
        spent.append(now)
    return np.array(spent)


def beyond(rounds: Round, slack=SLACK) -> np.ndarray:
    """f64[R,B]: the time of each live row beyond what its tokens pay for."""
    paid = (1 + slack) * rounds.emitted.cumsum(0)
    return np.where(rounds.emitted > 0, clock(rounds)[:, None] - paid, -np.inf)


STEPS = 900


def drafts_of(kind, batch):
    """What a drafter has and what is accepted of it, i32[R,B] each."""
    draw = np.random.default_rng(0)
    found = np.full((STEPS, batch), MOST)
    accepted = np.zeros((STEPS, batch), int)
    if kind == "first right":
        accepted[:20] = MOST
    elif kind == "random":
        accepted = draw.integers(0, 6, (STEPS, batch)) == 0
        found = draw.integers(0, MOST + 1, (STEPS, batch))
    elif kind == "none found":
        found[:] = 0
    elif kind == "one row right":
        accepted[:, 0] = MOST
    return found, accepted.astype(int)


KINDS = ["wrong", "first right", "random", "none found", "one row right"]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_lose_no_more_than_the_slack(kind):
    """In every prefix, for rows of other lengths; without a bound the same drafts lose more."""
    given, total = drafts_of(kind, 3), np.array([900, 300, 600])
    for credit, pauses in ((1, True), (1, False), (0, True), (5, True)):
        late = beyond(played(made(SLACK, credit=credit), *given, total, pauses=pauses))
        assert late.max() < credit + max(TIMES) - 1 + 1e-3, (credit, pauses)
    if kind == "wrong":
        assert late.max() > 5
    assert beyond(played(made(1.0), *given, total)).max() > 3 * max(TIMES)


@pytest.mark.parametrize(("kind", "missed"), [("wrong", 0), ("wrong", MISSED), ("none found", 0)])
def test_the_slack_is_used(kind, missed):
    """A draft is made as soon as the bank is back at 0, however the rounds before it went by."""
    for pauses in (True, False):
        own, given = made(SLACK, missed=missed), drafts_of(kind, 1)
        rounds = played(own, *given, [900], pauses=pauses)
        left = 1 + (1 + SLACK) * rounds.emitted.cumsum(0)[:, 0] - clock(rounds, missed=missed)
        # The first drafts take what the bank begins with.
        before, after = np.r_[1, left[:-1]][rounds.asked][10:], left[rounds.asked][10:]
        assert len(after) > 2 and after.max() < SLACK + 1e-3, pauses
        if not missed:
            assert before.min() > -1e-3 and before.max() < SLACK + 1e-3, pauses


def test_trials_lose_no_more_than_the_slack():
    """Nothing is expected of drafts, and half of the time is for trials."""
    given = drafts_of("wrong", 2)
    bounded, free = (
        played(made(slack, share=0.05, explore=0.5), *given, [900, 900]) for slack in (SLACK, 1.0)
    )
    assert beyond(bounded).max() < max(TIMES) + 1e-3 < beyond(free).max()
    assert bounded.asked.sum() > 12


def test_open_rows_have_one_bank():
    """The mean of the rows loses no more than the slack."""
    total = np.full(2, 10**6)
    wrong = played(made(SLACK, rows="open"), *drafts_of("wrong", 2), total)
    assert beyond(wrong).mean(1).max() < max(TIMES) + 1e-3
    found, accepted = drafts_of("one row right", 2)
    apart = played(made(SLACK), found, accepted, total, pauses=False)
    together = played(made(SLACK, rows="open"), found, accepted, total, pauses=False)
    assert (together.drafted == MOST).all()
    assert (apart.drafted > 0).mean() < 0.1


@pytest.mark.parametrize("slack", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("kind", ["wrong", "none found", "one row right"])
def test_a_pause_ends_where_the_rounds_would(kind, slack):
    """The bank is back at 0 after a whole number of rounds, which rounding must not change."""
    own = made(slack, weight=20.0, empty=1.25, missed=0.0, explore=0.02)
    given, total = drafts_of(kind, 2), [500, 800]
    each = played(own, *given, total, pauses=False)
    rounds = played(own, *given, total)
    drafted = np.repeat(rounds.drafted, rounds.rounds)
    assert drafted.tolist() == each.drafted[: len(drafted)].tolist()
    assert rounds.rounds.max() > 3


def test_good_drafts_are_not_hindered():
    draw = np.random.default_rng(0)
    accepted = (draw.random((60, 4, MOST)) < 0.9).cumprod(-1).sum(-1)
    found, total = np.full((60, 4), MOST), [10**6] * 4
    bounded, free = (
        played(made(slack, weight=4.0), found, accepted, total) for slack in (SLACK, 1.0)
    )
    assert bounded.drafted[5:].tolist() == free.drafted[5:].tolist()
    assert (free.drafted > 0).all()


def test_the_bank_of_each_round():
    """By hand: drafts of other lengths, a search, a pause, a new row, and a draft after them."""
    own = made(SLACK)
    assert own.pause is not None
    state = begun(own, 2)
    np.testing.assert_array_equal(state.bank, 1)
    bank, earns = np.ones(2), 1 + SLACK
    for drafted, accepted, spent in (
        ([3, 1], [2, 0], TIMES[3]),
        ([1, 0], [1, 0], TIMES[1]),
        ([0, 2], [0, 1], TIMES[2]),
    ):
        drafted, accepted = jnp.asarray(drafted), jnp.asarray(accepted)
        state = state.replace(length=jnp.full((2,), MOST))
        state = updated(own, state, drafted, accepted, accepted + 1)
        bank += earns * np.asarray(accepted + 1) - spent
        np.testing.assert_allclose(state.bank, bank, rtol=1e-5)
    none, one = jnp.zeros((2,), jnp.int32), jnp.ones((2,), jnp.int32)
    state = state.replace(length=jnp.full((2,), MOST))
    state = updated(own, state, none, none, one)
    state = updated(own, state.replace(length=none), none, none, one)
    state = own.pause.after(state, jnp.full((2,), 5))
    # Row 1 is replaced, and then one more round has no draft.
    fresh = begun(own, 1)
    state = jax.tree.map(lambda a, b: a.at[1].set(b[0]), state, fresh)
    state = updated(own, state.replace(length=none), none, none, one)
    state = updated(own, state.replace(length=one), one, none, one)
    # The rounds of each row without a draft, and what a draft after them has to read.
    bank += (earns - 1 - MISSED) * 8 + earns - TIMES[1] - (EMPTY - 1)
    bank[1] = 1 + (earns - 1 - MISSED) * 1 + earns - TIMES[1]
    np.testing.assert_allclose(state.bank, bank, rtol=1e-5)
    assert state.idle.tolist() == [0, 0]


def test_nothing_is_drafted_until_the_bank_is_back():
    none, most = jnp.zeros((2,), jnp.int32), jnp.full((2,), MOST)
    # Two drafts cost 1.8 more than nothing, and give 1 + 2 slack.
    for slack, rounds in ((0.05, 14), (0.0, FOREVER)):
        own = made(slack, missed=0.0)
        assert own.pause is not None and own.limit is not None
        state = begun(own, 2)
        for _ in range(2):
            assert own.limit(state).tolist() == [MOST] * 2
            state = updated(own, state, most, none, none + 1)
        # Of a lookup too: what it has found is not verified.
        np.testing.assert_array_equal(control.longest(own, state, most), 0)
        assert own.pause.rounds(state, jnp.ones((2,), bool)).tolist() == [rounds] * 2
        # A finished row has no part in it.
        only = own.pause.after(state.replace(bank=jnp.asarray([0.5, -1.0])), jnp.asarray([1, 0]))
        assert int(own.limit(only)[0]) == MOST


def test_a_row_without_tokens_of_this_drafter_loses_nothing():
    """Inside another drafter it has tokens of others: their rounds are not counted here."""
    own = made(SLACK, missed=0.0)
    state, most = begun(own, 2), jnp.full((2,), MOST)
    for _ in range(3):
        before = np.asarray(state.bank)
        state = updated(own, state, most, most, jnp.asarray([MOST + 1, 0]))
        assert float(state.bank[0]) > before[0] and float(state.bank[1]) == before[1]
    only = own.limit
    assert only is not None and only(state).tolist() == [MOST] * 2


def test_a_new_row_waits_for_the_others():
    """It was put into the batch with a length of its own, which would cost the others time."""
    own, none = made(SLACK), jnp.zeros((2,), jnp.int32)
    state, most = begun(own, 2), jnp.full((2,), MOST)
    for _ in range(2):
        state = updated(own, state, most, none, none + 1)
    state = jax.tree.map(lambda a, b: a.at[1].set(b[0]), state, begun(own, 1))
    assert state.length.tolist() == [0, MOST] and float(state.bank[0]) < 0
    assert own.limit is not None and own.limit(state).tolist() == [0, 0]
    after = updated(own, state, none, none, none + 1)
    # The round is one without a draft, not one that has looked for drafts and found none.
    np.testing.assert_allclose(
        after.bank + after.idle * (SLACK - MISSED),
        state.bank + SLACK - MISSED,
        atol=1e-5,
    )
    assert not after.found[1].any()


def test_rounds_that_another_drafter_wrote():
    """In all rows: only a pause goes on. In one row: its draft is not this drafter's."""
    own, most = made(SLACK, weight=4.0), jnp.full((2,), MOST)
    state = updated(own, begun(own, 2), most, most, most + 1)
    both = updated(own, state, most, most * 0, jnp.zeros((2,), jnp.int32))
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(both), strict=True):
        np.testing.assert_array_equal(before, after)
    one = updated(own, state, jnp.asarray([1, MOST]), jnp.asarray([1, 0]), jnp.asarray([2, 0]))
    np.testing.assert_array_equal(one.tested[1], state.tested[1])
    # The time is that of the draft of one token.
    gain = 2 * (1 + SLACK) - TIMES[1]
    np.testing.assert_allclose(one.bank - state.bank, [gain, 0], atol=1e-5)
    none = jnp.zeros((2,), jnp.int32)
    own = made(SLACK, share=0.0, missed=0.0)
    rested = begun(own, 2)
    assert own.limit(rested).tolist() == [0, 0] and (rested.due > 1).all()
    for _ in range(int(rested.due[0])):
        assert own.limit(rested).tolist() == [0, 0]
        rested = updated(own, rested, most, most * 0, none)
    assert (own.limit(rested) > 0).all() and float(rested.bank[0]) == 1.0
