"""Policies for draft lengths under load: estimates under censoring, choices, exploration."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from specjax.errors import UserError
from specjax.theory import chain, policies, round_costs
from specjax.theory.acceptance import AcceptanceEstimate, RowEstimates, counts_by_depth

pytestmark = pytest.mark.fast

LIMIT = 5


def batch_of(rows, available: npt.ArrayLike = LIMIT, prompt=0):
    every = np.broadcast_to(np.asarray(available), (rows,))
    return policies.RunningBatch(np.arange(rows), np.full(rows, 10), every, prompt)


def outcome(random, rates, drafted):
    """Accepted tokens of rows whose depths are accepted independently with ``rates``."""
    right = random.random((len(drafted), len(rates))) < rates
    return np.minimum(np.cumprod(right, axis=1).sum(1), drafted)


def toy(work):
    """A pass takes 1 up to 128 tokens, then in proportion; a draft step .05."""
    return max(1.0, (work.verified + work.prompt) / 128) + 0.05 * len(work.drafting)


# Estimates --------------------------------------------------------------------------------------


def test_a_depth_is_tested_if_all_before_were_accepted():
    tested, right = counts_by_depth(np.array([0, 1, 2, 3]), np.array([3, 3, 2, 3]), 4)
    assert tested.tolist() == [4, 3, 1, 0] and right.tolist() == [3, 2, 1, 0]


class Unconditional(AcceptanceEstimate):
    """Wrong: a row that ended earlier counts as a failure of every depth that it drafted."""

    def observe(self, accepted, drafted):
        for depth in range(self._limit):
            self._tested[depth] += (drafted > depth).sum()
            self._accepted[depth] += (accepted > depth).sum()


class Undrafted(AcceptanceEstimate):
    """Wrong: a depth that was not drafted counts as a failure."""

    def observe(self, accepted, drafted):
        super().observe(accepted, np.full_like(drafted, self._limit))


def recovers(estimate):
    """The rates by depth, although lengths vary and deep tokens are seldom tested."""
    random, rates = np.random.default_rng(0), np.array([0.9, 0.6, 0.8, 0.3, 0.7])
    for _ in range(400):
        drafted = random.integers(0, LIMIT + 1, 32)
        estimate.observe(outcome(random, rates, drafted), drafted)
    np.testing.assert_allclose(estimate.rates(), rates, atol=0.06)
    assert estimate.cumulative()[2] == pytest.approx(0.9 + 0.9 * 0.6, abs=0.03)


def test_estimates_recover_conditional_rates():
    recovers(AcceptanceEstimate(LIMIT))
    for wrong in (Unconditional, Undrafted):
        with pytest.raises(AssertionError):
            recovers(wrong(LIMIT))


def test_estimates_forget_and_continue_to_untested_depths():
    estimate = AcceptanceEstimate(3, memory=100, start=0.4)
    np.testing.assert_allclose(estimate.rates(), 0.4)
    ones = np.ones(20, int)
    for _ in range(50):
        estimate.observe(ones, ones)
    # Depth 1 was always accepted; deeper ones begin with its rate.
    assert estimate.rates()[0] > 0.9 and np.ptp(estimate.rates()) < 1e-12
    for _ in range(50):
        estimate.observe(0 * ones, ones)
    assert estimate.rates()[0] < 0.1


def test_estimates_of_rows_begin_with_the_mean_of_earlier_requests():
    rows = RowEstimates(start=0.5, prior=2.0, fade=1.0)
    np.testing.assert_allclose(rows.rates(np.array([7, 9])), 0.5)
    # Row 7 has an accepted token and a rejected one, row 9 an accepted one.
    rows.observe(np.array([1, 1]), np.array([2, 1]))
    np.testing.assert_allclose(rows.rates(np.array([9, 7])), [(1 + 1) / 3, (1 + 1) / 4])
    rows.observe(np.array([0, 0]), np.array([0, 0]))  # nothing drafted, nothing learnt
    np.testing.assert_allclose(rows.rates(np.array([9, 7])), [(1 + 1) / 3, (1 + 1) / 4])
    # Request 7 leaves with a rate of (1 + .5) / (2 + 1): a new one begins with the mean, .5.
    np.testing.assert_allclose(rows.rates(np.array([9, 12])), [2 / 3, 0.5])
    # Request 9 leaves with .75.
    np.testing.assert_allclose(rows.rates(np.array([12, 13])), 0.5 + 0.25 / 3)


# Choices ----------------------------------------------------------------------------------------


def learnt(policy, rate, rounds=60, rows=64):
    """The policy after rounds in which all lengths were drafted."""
    random = np.random.default_rng(1)
    for _ in range(rounds):
        policy.length(batch_of(rows))
        drafted = np.full(rows, LIMIT)
        policy.observe(outcome(random, np.full(LIMIT, rate), drafted), drafted)
    return policy


@pytest.mark.parametrize(("rows", "best"), [(1, 5), (64, 1), (256, 0)])
def test_goodput_chooses_by_the_load(rows, best):
    """Many tokens per pass for few rows, none for many, with rates that were observed."""
    policy = learnt(policies.GoodputLength(toy, LIMIT, explore=0.0), 0.7)
    assert policy.length(batch_of(rows)).tolist() == [best] * rows
    each = learnt(policies.GoodputRows(toy, LIMIT, explore=0.0), 0.7)
    assert each.length(batch_of(rows)).mean() == pytest.approx(best, abs=0.35)


def test_goodput_regards_what_can_be_drafted():
    policy = learnt(policies.GoodputLength(toy, LIMIT, explore=0.0), 0.7)
    assert policy.length(batch_of(4, [0, 1, 5, 9])).tolist() == [0, 1, 4, 4]
    # Where 8 of 64 rows can draft, two tokens cost less than in a full batch, which drafts one.
    some = np.zeros(64, int)
    some[:8] = LIMIT
    assert policy.length(batch_of(64, some)).tolist() == [2] * 8 + [0] * 56


def test_a_prompt_does_not_make_drafts_cheap():
    """A prompt of 1000 tokens takes 8 steps anyway; a ratio of sums would then draft 5 tokens."""
    policy = learnt(policies.GoodputLength(toy, LIMIT, explore=0.0), 0.7)
    lengths = policy.length(batch_of(64, prompt=1000))
    assert lengths.tolist() == [0] * 64
    k = np.arange(LIMIT + 1)
    tokens = np.concatenate([[1], 1 + np.cumsum(0.7 ** k[1:])])
    times = [toy(round_costs.work_of(np.full(64, n), 0, 1000)) for n in k]
    assert np.argmax(tokens / times) > 0


def test_rows_get_lengths_by_their_own_acceptance():
    """The best lengths of two kinds of rows, of all pairs, for the mean of the rows' logarithms."""

    def time(work):
        return 1 + work.verified / 256

    policy = policies.GoodputRows(time, LIMIT, explore=0.0)
    random, drafted = np.random.default_rng(2), np.full(64, LIMIT)
    good = np.arange(64) < 16
    for _ in range(60):
        policy.length(batch_of(64))
        right = outcome(random, np.full(LIMIT, 0.95), drafted)
        policy.observe(
            np.where(good, right, outcome(random, np.full(LIMIT, 0.02), drafted)), drafted
        )
    lengths = policy.length(batch_of(64))
    best = max(
        itertools.product(range(LIMIT + 1), repeat=2),
        key=lambda k: (
            16 * np.log(chain.expected_tokens(0.95, k[0]))
            + 48 * np.log(chain.expected_tokens(0.02, k[1]))
            - 64 * np.log(time(round_costs.work_of(np.repeat(k, (16, 48)), 0)))
        ),
    )
    assert best[0] >= 3 and best[1] == 0
    assert abs(lengths[good].mean() - best[0]) <= 1 and lengths[~good].mean() < 0.2


def test_exploration_is_limited_and_finds_a_change():
    """Where no draft pays, a small share of the time goes into drafts; better ones are noticed."""
    policy = learnt(policies.GoodputLength(toy, LIMIT, explore=0.005), 0.02)
    random, rows = np.random.default_rng(4), 64
    spent = {}
    for part, rate in (("bad", 0.02), ("good", 0.9)):
        plain = time = 0.0
        for _ in range(3000):
            drafted = np.asarray(policy.length(batch_of(rows)))
            policy.observe(outcome(random, np.full(LIMIT, rate), drafted), drafted)
            time, plain = time + toy(round_costs.work_of(drafted, 0)), plain + 1.0
        spent[part] = time / plain - 1
    assert 0 < spent["bad"] < 0.01
    assert policy.length(batch_of(rows)).mean() >= 1
    blind = learnt(policies.GoodputLength(toy, LIMIT, explore=0.0), 0.02)
    assert not blind.length(batch_of(rows)).any()


def test_simple_policies():
    ladder = policies.LengthLadder({16: 2, 1: 5, 64: 0})
    assert [ladder.length(batch_of(n)) for n in (1, 15, 16, 63, 64, 500)] == [5, 5, 2, 2, 0, 0]
    assert policies.LengthLadder({4: 1}).length(batch_of(3)) == 0
    follow = policies.FollowAcceptance(6, start=4)
    assert follow.length(batch_of(3)).tolist() == [4, 4, 4]
    follow.observe(np.array([4, 3, 0]), np.array([4, 4, 0]))
    assert follow.length(batch_of(3)).tolist() == [6, 3, 4]
    follow.observe(np.array([6, 0, 0]), np.array([6, 3, 4]))
    assert follow.length(batch_of(2)).tolist() == [6, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: policies.FixedLength(-1), "length is -1; it must be a whole number >= 0"),
        (lambda: policies.LengthLadder({}), "lengths is empty"),
        (lambda: policies.LengthLadder({0: 3}), "a batch size is 0"),
        (lambda: policies.FollowAcceptance(0), "limit is 0"),
        (lambda: policies.GoodputLength(toy, 3, explore=2), "explore is 2"),
        (lambda: AcceptanceEstimate(3, memory=0), "memory is 0; it must be positive"),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value)
