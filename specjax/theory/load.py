"""A server under load, simulated: requests arrive, wait, and share the rounds of a running batch.

Greedy decoding is simulated exactly from recorded acceptance. For each position of a recorded
output ``AcceptanceTraces`` holds how many tokens of a draft made there would have been accepted. So
a draft of any length at any position has a known outcome, and every policy
(``specjax.theory.policies``) sees the text that it would have seen.

Requests join the batch between two rounds, in the order of arrival, while it has fewer than
``max_batch`` rows, and leave it after the round of their last token. The pass of the round in which
a request joins also reads its prompt. The time of a round comes from a cost model
(``specjax.theory.round_costs``). There is no other randomness than the requests'.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specjax import checks
from specjax.errors import UserError
from specjax.theory.policies import Policy, RunningBatch
from specjax.theory.round_costs import RoundCosts, work_of


class AcceptanceTraces(NamedTuple):
    """Outcomes of drafts of up to K tokens at every position of N recorded outputs.

    Output tokens are numbered from 0; the draft at position j begins with a guess of token j.
    """

    accepted: np.ndarray  # i[N,L] 0..K; beyond an output: 0
    drafted: np.ndarray  # i[N,L] tokens that the drafter proposed there, at least ``accepted``
    output: np.ndarray  # i[N] tokens of the output, 1..L
    prompt: np.ndarray  # i[N] tokens of the prompt

    def checked(self) -> AcceptanceTraces:
        """Itself. Raises UserError for shapes and numbers that no recording has."""
        shapes = [np.shape(each) for each in self]
        rows = shapes[0][:1]
        if len(shapes[0]) != 2 or shapes != [shapes[0], shapes[0], rows, rows] or not rows[0]:
            raise UserError(
                f"the traces have the shapes {shapes}; they must be [N,L], [N,L], [N] and [N]"
            )
        if (np.asarray(self.accepted) < 0).any() or (self.accepted > self.drafted).any():
            raise UserError("a trace accepts more tokens than were drafted, or fewer than 0")
        if (self.output < 1).any() or (self.output > shapes[0][1]).any() or (self.prompt < 0).any():
            raise UserError(
                f"an output of a trace is not in 1..{shapes[0][1]}, or a prompt below 0"
            )
        return self


class Requests(NamedTuple):
    """R requests, in the order of arrival."""

    arrival: np.ndarray  # f64[R] seconds, not falling
    trace: np.ndarray  # i64[R] which trace
    output: np.ndarray  # i64[R] tokens to write, at most those of the trace


class Served(NamedTuple):
    """What happened: to each of R requests, and in each of N rounds."""

    begin: np.ndarray  # f64[R] seconds: the round began in which the request joined
    first: np.ndarray  # f64[R] its first token was written
    finish: np.ndarray  # f64[R] its last one
    end: np.ndarray  # f64[N] seconds: the round ended
    emitted: np.ndarray  # i64[N] tokens of all rows, up to the ends of their outputs
    rows: np.ndarray  # i64[N]
    drafted: np.ndarray  # i64[N] tokens of all rows


def poisson(
    rate: float, count: int, traces: AcceptanceTraces, seed: int, *, output: int = 0
) -> Requests:
    """``count`` requests that arrive independently, ``rate`` per second, with random traces.

    ``output`` is the length of every output (0: that of its trace). The same seed gives the same
    traces at every rate, and arrivals that differ by a factor. Raises UserError.
    """
    checks.cost("rate", rate, positive=True)
    checks.counts(count=count)
    random = np.random.default_rng(seed)
    which = random.integers(0, len(traces.output), count)
    lengths = np.asarray(traces.output, np.int64)[which]
    if output:
        if output > lengths.min():
            raise UserError(f"output is {output} and a trace has {lengths.min()} tokens; lower it")
        lengths = np.full(count, checks.count("output", output, 1))
    return Requests(np.cumsum(random.exponential(1 / rate, count)), which, lengths)


def simulate(
    requests: Requests,
    traces: AcceptanceTraces,
    policy: Policy,
    costs: RoundCosts,
    *,
    max_batch: int,
) -> Served:
    """Serves all requests. Raises UserError for a request without a trace of its length.

    ``policy`` is used up: it keeps what it has learnt.
    """
    _check(requests, traces, max_batch)
    count, clock, waiting = len(requests.arrival), 0.0, 0
    arrival = requests.arrival
    prompts, position = np.asarray(traces.prompt)[requests.trace], np.zeros(count, np.int64)
    begin, first, finish = (np.full(count, np.nan) for _ in range(3))
    running = np.zeros(0, np.int64)
    rounds: list[tuple[float, int, int, int]] = []
    while waiting < count or len(running):
        if not len(running):
            clock = max(clock, arrival[waiting])
        # Requests that have arrived; those that find a free row join.
        arrived = int(np.searchsorted(arrival, clock, "right"))
        joined = np.arange(waiting, min(arrived, waiting + max_batch - len(running)))
        waiting += len(joined)
        begin[joined] = clock
        running = np.concatenate([running, joined])
        at, trace = position[running], requests.trace[running]
        most = traces.drafted[trace, at].astype(np.int64)
        context, prompt = prompts[running] + at, int(prompts[joined].sum())
        batch = RunningBatch(running, context, most, prompt, arrived - waiting)
        drafted = np.minimum(_lengths(policy.length(batch), len(running)), most)
        accepted = np.minimum(traces.accepted[trace, at], drafted)
        clock += costs(work_of(drafted, float(context.sum()), prompt))
        emitted = np.minimum(accepted + 1, requests.output[running] - at)
        policy.observe(accepted, drafted)
        position[running] = at + emitted
        first[running[at == 0]] = clock
        done = position[running] == requests.output[running]
        finish[running[done]] = clock
        rounds.append((clock, int(emitted.sum()), len(running), int(drafted.sum())))
        running = running[~done]
    end, *numbers = zip(*rounds, strict=True)
    return Served(begin, first, finish, np.array(end), *map(np.array, numbers))


def _lengths(lengths: int | np.ndarray, rows: int) -> np.ndarray:
    """i64[rows], of a policy's answer. Raises UserError."""
    given = np.asarray(lengths)
    if given.shape not in ((), (rows,)) or given.dtype.kind != "i" or (given < 0).any():
        raise UserError(
            f"the policy's length is {lengths!r:.60}; it must be a whole number >= 0, "
            f"or one for each of the {rows} rows"
        )
    return given


def _check(requests: Requests, traces: AcceptanceTraces, max_batch: int) -> None:
    traces.checked()
    checks.counts(max_batch=max_batch)
    arrival = checks.numbers("arrival", requests.arrival)
    if not arrival.size or arrival.ndim != 1 or (np.diff(arrival) < 0).any() or arrival[0] < 0:
        raise UserError("arrival must be a list of times that do not fall, from 0 on")
    if ((requests.trace < 0) | (requests.trace >= len(traces.output))).any():
        raise UserError(f"a request names a trace outside of 0..{len(traces.output) - 1}")
    if ((requests.output < 1) | (requests.output > traces.output[requests.trace])).any():
        raise UserError("a request asks for no token, or for more tokens than its trace has")


class Percentiles(NamedTuple):
    """The distribution of a time, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class LoadSummary(NamedTuple):
    """What a server delivered, without its first requests."""

    latency: Percentiles  # from arrival to the last token of a request
    per_token: Percentiles  # the same, divided by the request's tokens
    first: Percentiles  # from arrival to the first token
    wait: Percentiles  # from arrival to joining the batch
    goodput: float  # emitted tokens per second, while requests arrived
    offered: float  # requested tokens per second
    rows: float  # mean rows of the batch, over rounds
    drafted: float  # mean draft tokens of a row and round
    tau: float  # tokens per row and round


def summarise(requests: Requests, served: Served, skip: float = 0.1) -> LoadSummary:
    """The numbers of the requests after the first share ``skip`` of them.

    Goodput counts all rounds that end before the last arrival: from then on the batch shrinks.
    Beyond saturation the queue grows until then, so latencies depend on the number of requests.
    """
    first = int(checks.one_rate("skip", skip) * len(requests.arrival))
    if len(requests.arrival) - first < 2:
        raise UserError("there are fewer than two requests to summarise; give more, or skip less")
    chosen = slice(first, None)
    until = requests.arrival[-1]
    arrival, output = requests.arrival[chosen], requests.output[chosen]
    latency = served.finish[chosen] - arrival
    during = served.end <= until
    if not during.any():
        raise UserError("no round ended while the requests arrived; give more requests")
    rows, emitted = served.rows[during].sum(), served.emitted[during].sum()
    return LoadSummary(
        latency=_percentiles(latency),
        per_token=_percentiles(latency / output),
        first=_percentiles(served.first[chosen] - arrival),
        wait=_percentiles(served.begin[chosen] - arrival),
        goodput=float(emitted / until),
        offered=float(requests.output.sum() / until),
        rows=float(served.rows[during].mean()),
        drafted=float(served.drafted[during].sum() / rows),
        tau=float(emitted / rows),
    )


def _percentiles(values: np.ndarray) -> Percentiles:
    return Percentiles(float(values.mean()), *np.percentile(values, (50, 90, 99)).tolist())
