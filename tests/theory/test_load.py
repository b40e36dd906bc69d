"""The simulated server: conservation, queues with known waits, closed forms of goodput."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import numpy as np
import pytest

from specjax.errors import UserError
from specjax.theory import chain, load, policies, roofline, round_costs
from specjax.theory.devices import named

pytestmark = pytest.mark.fast

LIMIT = 5


def traces_of(rates, tokens=200, limit=LIMIT, prompt=10, seed=0):
    """One trace for each rate: every token is guessed right independently with this probability."""
    rates = np.asarray(rates, float)
    right = np.random.default_rng(seed).random((len(rates), tokens + limit)) < rates[:, None]
    run = np.zeros((len(rates), tokens + limit + 1), int)
    for place in range(tokens + limit - 1, -1, -1):
        run[:, place] = np.where(right[:, place], run[:, place + 1] + 1, 0)
    accepted = np.minimum(run[:, :tokens], limit)
    whole = np.full(len(rates), tokens)
    return load.AcceptanceTraces(
        accepted, np.full_like(accepted, limit), whole, np.full(len(rates), prompt)
    )


def requests_at(arrival, output):
    count = len(arrival)
    return load.Requests(np.asarray(arrival, float), np.arange(count), np.full(count, output))


class Anything:
    """Lengths at random, one per row; records what it sees."""

    def __init__(self):
        self.random, self.rounds = np.random.default_rng(3), []

    def length(self, batch):
        self.batch = batch
        return self.random.integers(0, LIMIT + 3, len(batch.requests))

    def observe(self, accepted, drafted):
        self.rounds.append((self.batch, accepted, drafted))


def time_of(work):
    """Seconds that grow with everything that a round does."""
    return 0.1 + 0.01 * work.verified + 1e-4 * work.context + 0.002 * work.prompt


def conserves(module):
    """Every request is served once, in order, with exactly the tokens that its trace gives."""
    traces = traces_of([0.2, 0.6, 0.9], tokens=40)
    traces.drafted[:, ::3] = np.maximum(traces.accepted[:, ::3], 1)
    requests = module.poisson(2.0, 120, traces, 7)
    requests = requests._replace(output=requests.output - np.arange(120) % 30)
    policy = Anything()
    served = module.simulate(requests, traces, policy, time_of, max_batch=6)
    assert served.emitted.sum() == requests.output.sum()
    assert (served.begin >= requests.arrival).all() and (np.diff(served.begin) >= 0).all()
    assert (served.first > served.begin).all() and (served.finish >= served.first).all()
    assert served.rows.max() == 6 and (np.diff(served.end) > 0).all()
    assert served.finish.max() == served.end[-1]
    # A trace read again, request by request: each round is one draft at the reached position.
    position, read = np.zeros(120, int), np.zeros(120, bool)
    clock = 0.0
    for (batch, accepted, drafted), end in zip(policy.rounds, served.end, strict=True):
        new = ~read[batch.requests]
        read[batch.requests] = True
        at, trace = position[batch.requests], requests.trace[batch.requests]
        np.testing.assert_array_equal(batch.context, 10 + at)
        assert batch.prompt == 10 * new.sum() and (drafted <= traces.drafted[trace, at]).all()
        np.testing.assert_array_equal(accepted, np.minimum(traces.accepted[trace, at], drafted))
        position[batch.requests] += accepted + 1
        clock = max(clock, requests.arrival[batch.requests].max())
        work = round_costs.work_of(drafted, batch.context.sum(), batch.prompt)
        clock += time_of(work)
        assert clock == pytest.approx(end)
        # No row is free while a request waits.
        waiting = (requests.arrival <= end - time_of(work)).sum() - read.sum()
        assert waiting == batch.waiting and (not waiting or len(batch.requests) == 6)
    assert read.all() and (position >= requests.output).all()
    again = module.simulate(requests, traces, Anything(), time_of, max_batch=6)
    assert all((a == b).all() for a, b in zip(served, again, strict=True))


def waits_like_a_queue(module):
    """No speculation, one row: an M/D/1 queue; Pollaczek and Khinchine give its mean wait."""
    share, service, count = 0.6, 2.0, 12000
    traces = traces_of([0.5], tokens=2)
    requests = module.poisson(share / service, count, traces, 1)
    served = module.simulate(
        requests, traces, policies.FixedLength(0), lambda work: service / 2, max_batch=1
    )
    wait = (served.begin - requests.arrival)[count // 20 :]
    # Waits depend on each other: the error follows from means of long parts.
    parts = wait[: len(wait) // 30 * 30].reshape(30, -1).mean(1)
    error = parts.std(ddof=1) / 30**0.5
    expected = share * service / (2 * (1 - share))
    assert abs(wait.mean() - expected) < 4 * error and error < 0.1 * expected
    summary = module.summarise(requests, served, skip=0.05)
    assert summary.wait.mean == pytest.approx(wait.mean())
    assert summary.latency.mean == pytest.approx(wait.mean() + service)


def has_the_goodput_of_theory(module):
    """A full batch with constant acceptance: tokens per second are those of equation 1."""
    rows, rate, k, tokens = 64, 0.7, 3, 400
    traces = traces_of(np.full(rows, rate), tokens=tokens)
    costs = round_costs.measured([(1, 1.0), (128, 1.0), (256, 2.0)], [(1, 0.05), (64, 0.06)])
    served = module.simulate(
        requests_at(np.zeros(rows), tokens), traces, policies.FixedLength(k), costs, max_batch=rows
    )
    full = np.flatnonzero(served.rows == rows)[1:-1]  # without the prompts, and the first ends
    time = np.diff(served.end)[full[0] - 1 : full[-1]]
    assert time == pytest.approx(0.06 * k + 2.0)
    measured = served.emitted[full].mean() / time[0]
    error = served.emitted[full].std(ddof=1) / len(full) ** 0.5 / time[0]
    expected = rows * chain.expected_tokens(rate, k) / (0.06 * k + 2.0)
    assert abs(measured - expected) < 4 * error and error < 0.01 * expected


CHECKS = (conserves, waits_like_a_queue, has_the_goodput_of_theory)


@pytest.mark.parametrize("check", CHECKS)
def test_the_server(check):
    check(load)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # Tokens beyond the end of an output are counted.
        ("np.minimum(accepted + 1, requests.output[running] - at)", "accepted + 1"),
        # The target's own token is forgotten where a draft was accepted.
        ("position[running] = at + emitted", "position[running] = at + np.maximum(accepted, 1)"),
        # More is accepted than was drafted.
        ("np.minimum(traces.accepted[trace, at], drafted)", "traces.accepted[trace, at]"),
        # Requests join before they arrive.
        ('arrived = int(np.searchsorted(arrival, clock, "right"))', "arrived = count"),
        # A batch ends before the next one begins.
        ("waiting + max_batch - len(running)", "waiting + max_batch * (not len(running))"),
        # The batch has one row more than allowed.
        ("waiting + max_batch - len(running)", "waiting + max_batch + 1 - len(running)"),
        # Drafts cost nothing.
        ("costs(work_of(drafted,", "costs(work_of(0 * drafted,"),
        # Prompts cost nothing.
        ("costs(work_of(drafted, float(context.sum()), prompt))", "costs(work_of(drafted, 1e3))"),
        # A request is ready one round late.
        ("finish[running[done]] = clock", "finish[running[done]] = clock + 1"),
        # Every trace is read from its beginning.
        ("traces.accepted[trace, at]", "traces.accepted[trace, 0]"),
    ],
)
def test_a_wrong_server_is_noticed(right, wrong):
    source = inspect.getsource(load)
    assert source.count(right) == 1
    mutant = types.ModuleType("mutant")
    sys.modules["mutant"] = mutant  # NamedTuple looks its module up
    try:
        exec(compile(source.replace(right, wrong), "mutant", "exec"), vars(mutant))
        with pytest.raises((AssertionError, IndexError, ValueError, UserError)):
            for check in CHECKS:
                check(mutant)
    finally:
        del sys.modules["mutant"]


def test_summary_of_an_overloaded_server():
    """Two requests per second to a server of one token per second and row."""
    traces = traces_of([0.0], tokens=1)
    requests = requests_at(np.arange(100) / 2, 1)._replace(trace=np.zeros(100, int))
    served = load.simulate(requests, traces, policies.FixedLength(0), lambda work: 1.0, max_batch=1)
    summary = load.summarise(requests, served, skip=0.0)
    assert summary.goodput == pytest.approx(49 / 49.5)
    assert summary.offered == pytest.approx(100 / 49.5)
    assert summary.rows == 1 and summary.drafted == 0 and summary.tau == 1
    # Request i arrives at i / 2 and leaves at i + 1.
    assert summary.latency.mean == pytest.approx(1 + 49.5 / 2)
    assert summary.latency.p50 == summary.first.p50 == summary.wait.p50 + 1


@pytest.mark.parametrize(("share", "long_wins"), [(0.15, True), (1.1, False)])
def test_goodput_control_follows_the_load(share, long_wins):
    """A long draft wins at low load and loses at high load; control is near the better one."""

    def costs(work):
        return max(1.0, (work.verified + work.prompt) / 48) + 0.05 * len(work.drafting)

    traces = traces_of(np.random.default_rng(5).beta(6, 3, 40), tokens=60)
    # A full batch of 48 rows writes 48 tokens in the time of 1, prompts apart.
    requests = load.poisson(share * 48 / 60, round(100 + 500 * share), traces, 2)
    choices = {
        0: policies.FixedLength(0),
        LIMIT: policies.FixedLength(LIMIT),
        "goodput": policies.GoodputLength(costs, LIMIT),
        "rows": policies.GoodputRows(costs, LIMIT),
    }
    found = {
        name: load.summarise(requests, load.simulate(requests, traces, policy, costs, max_batch=48))
        for name, policy in choices.items()
    }
    better, worse = (LIMIT, 0) if long_wins else (0, LIMIT)
    assert found[better].latency.mean < 0.8 * found[worse].latency.mean
    for name in ("goodput", "rows"):
        assert found[name].latency.mean < 1.02 * found[better].latency.mean
        assert found[name].goodput > 0.98 * found[better].goodput


# Costs of rounds --------------------------------------------------------------------------------


def test_work_of_a_ragged_batch():
    work = round_costs.work_of(np.array([0, 3, 1, 3]), 50.0, 7)
    assert work == (4, 11, 4, 50.0, [3, 2, 2], 7)
    assert round_costs.work_of(np.array([0, 0]), 5.0) == (2, 2, 1, 5.0, [], 0)


@pytest.mark.parametrize(("rows", "k", "context"), [(1, 0, 100), (3, 4, 1000), (300, 2, 10)])
def test_roofline_rounds_are_those_of_theory(rows, k, context):
    machine = named("H100 SXM").machine(1e-5)._replace(link=1e11)
    target = roofline.Model(8_000_000_000, 16e9, 131072.0, 16e9, 5e5, sent_bytes=1000.0)
    draft = roofline.Model(1_000_000_000, 2e9, 32768.0, 2e9, 1e5)
    costs = round_costs.RooflineRounds(machine, target, draft, 1e-4).checked()
    work = round_costs.work_of(np.full(rows, k), rows * context)
    expected = 1e-4 + roofline.pass_time(machine, target, rows, context, k + 1)
    expected += k * roofline.pass_time(machine, draft, rows, context)
    assert costs(work) == pytest.approx(expected, rel=1e-12)
    assert costs._replace(draft=None)(work) < expected or not k
    # A prompt of other rows adds tokens to the target's pass.
    more = costs(work._replace(prompt=5000)) - costs(work._replace(prompt=4000))
    assert more == pytest.approx(1000 * ((16e9 + context * 5e5) / machine.flops + 1e-8))


def test_measured_rounds_interpolate():
    passes, drafts = [(1, 1.0), (3, 2.0), (4, 4.0)], [(1, 0.1), (5, 0.5)]
    costs = round_costs.measured(passes, drafts, context=0.01, fixed=0.5)
    work = round_costs.work_of(np.array([1, 0]), 10.0)
    assert costs(work) == pytest.approx(0.5 + 0.1 + 2.0 + 0.1)
    padded = costs._replace(padded=True)  # 4 tokens, and both rows draft
    assert padded(work) == pytest.approx(0.5 + 0.1 + 4.0 + 0.2)
    work = round_costs.work_of(np.array([2, 1]), 0.0)  # 5 tokens: beyond the last, its slope
    assert costs(work) == pytest.approx(0.5 + 6.0 + 0.2 + 0.1)
    assert costs._replace(by_step=False)(work) == pytest.approx(0.5 + 6.0 + 0.2)
    assert round_costs.measured(passes)(work) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: round_costs.measured([(1, 1.0)]), "passes has shape (1, 2); give at least 2"),
        (lambda: round_costs.measured([(2, 1), (1, 2)]), "passes must have increasing sizes"),
        (lambda: round_costs.measured([(1, 0), (2, 2)]), "increasing sizes and positive times"),
        (lambda: load.poisson(0, 3, traces_of([0.5]), 0), "rate is 0; it must be positive"),
        (lambda: load.poisson(1, 3, traces_of([0.5], 4), 0, output=5), "output is 5 and a trace"),
        (
            lambda: load.simulate(
                requests_at([0.0], 9), traces_of([0.5], 8), Anything(), time_of, max_batch=1
            ),
            "more tokens than its trace has",
        ),
        (
            lambda: load.simulate(
                requests_at([1.0, 0.5], 1), traces_of([0.5]), Anything(), time_of, max_batch=1
            ),
            "arrival must be a list of times that do not fall",
        ),
        (
            lambda: load.simulate(
                requests_at([1.0, 2.0], 1), traces_of([0.5]), Anything(), time_of, max_batch=1
            ),
            "a request names a trace outside of 0..0",
        ),
        (
            lambda: traces_of([0.5])._replace(drafted=np.zeros((1, 200), int)).checked(),
            "a trace accepts more tokens than were drafted",
        ),
        (
            lambda: traces_of([0.5])._replace(output=np.array([0])).checked(),
            "an output of a trace is not in 1..200",
        ),
        (lambda: traces_of([0.5])._replace(prompt=np.zeros(3)).checked(), "have the shapes"),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_policy_must_give_lengths():
    class Half(Anything):
        def length(self, batch) -> Any:
            return 1.5

    with pytest.raises(UserError, match=r"the policy's length is 1.5; it must be a whole number"):
        load.simulate(requests_at([0.0], 5), traces_of([0.5]), Half(), time_of, max_batch=1)


def test_expected_tokens_of_a_trace():
    """The traces of these tests have the acceptance that the closed form takes."""
    accepted = traces_of([0.6], tokens=20000).accepted[0, ::7]  # beyond LIMIT: independent
    assert 1 + accepted.mean() == pytest.approx(chain.expected_tokens(0.6, LIMIT), rel=0.03)
