"""Measures what rounds cost by draft length, and how much is accepted: the profile of a controller.

The controllers ``goodput``, ``bandit`` and ``calibrated`` read it. Rounds with a draft of every
length run in the compiled decode loop, one length after the other in turns, on prompts that are not
measured afterwards. The median of the samples counts. Lookups have no draft in some rounds; these
cost what a round without a draft costs, and only the others count for a length.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, sharding
from specjax.bench import metrics
from specjax.bench.passes import Job, Method, batches, begin
from specjax.control import Controller, calibrated
from specjax.control import costs as control_costs
from specjax.control.costs import Costs, RoundCosts
from specjax.control.fixed import Length
from specjax.theory import calibration
from specjax.types import DecodeState

ROUNDS = 16  # of a sample
SAMPLES = 3
# Rounds of each prompt in which confidences are recorded.
CONFIDENCE_ROUNDS = 64
# A rate is counted as if one more token had been tested, and accepted with this probability.
PRIOR = 0.5


class _Sample(NamedTuple):
    """One run of the loop."""

    seconds: float  # per round
    drafted: float  # the share of the rounds in which any row had a draft
    counts: metrics.Counts


def lengths_of(longest: int) -> tuple[int, ...]:
    """The draft lengths that are measured for a drafter whose longest draft is ``longest``."""
    return tuple(sorted({0, *(n for n in control_costs.LENGTHS if n <= longest), longest}))


def measure(
    jobs: Sequence[Job],
    make: Callable[[str | Controller], Method],
    report: Callable[[str], None] = print,
    *,
    confidences: bool = False,
) -> dict[int, Costs]:
    """Batch size -> costs.

    Args:
        jobs: one for each batch size and kind of sampling, with the prompts to measure on.
        make: the method with a controller, as ``control.parse`` reads it.
        report: is called with a status message before every job.
        confidences: whether to fit a temperature to the drafter's confidence at each depth.
    """
    found: dict[int, dict[bool, RoundCosts]] = {}
    lengths: tuple[int, ...] = ()
    for job in jobs:
        greedy = not job.settings.get("temperature", 1.0)
        report(f"profile: batch {job.batch_size}, {'greedy' if greedy else 'sampled'}")
        longest = make("fixed:0").drafter.longest
        lengths = lengths_of(longest)
        found.setdefault(job.batch_size, {})[greedy] = _measured(job, make, lengths)
        if confidences:
            own = found[job.batch_size][greedy]
            found[job.batch_size][greedy] = own._replace(heats=_heats(job, make, lengths[-1]))
    # What was measured for one kind only stands for both.
    either = {size: next(iter(kinds.values())) for size, kinds in found.items()}
    return {
        size: Costs(lengths, kinds.get(True, either[size]), kinds.get(False, either[size]))
        for size, kinds in found.items()
    }


def _measured(job: Job, make: Callable[..., Method], lengths: tuple[int, ...]) -> RoundCosts:
    """One cell. The drafter is compiled once: the length is a number in its state."""
    method = make(f"fixed:{lengths[-1]}")
    first = next(batches(job))
    state = jax.block_until_ready(begin(job, method.drafter, method.params, *first))
    runs: dict[int, list[_Sample]] = {length: [] for length in lengths}
    for _ in range(SAMPLES + 1):
        for length in lengths:
            runs[length].append(_run(job, method, state, length))
    # The first run of a length may compile.
    seconds = {n: statistics.median(one.seconds for one in each[1:]) for n, each in runs.items()}
    plain, times = seconds[0], []
    for length in lengths:
        share = statistics.mean(one.drafted for one in runs[length])
        more = (seconds[length] - plain) / share if share else 0.0
        times.append(max(1 + more / plain, 0.05))
    times[0] = 1.0
    total = metrics.total([one.counts for one in runs[lengths[-1]]])
    rates = (total.passed + PRIOR) / (total.tested + 1)
    return RoundCosts(tuple(times), tuple(np.clip(rates, 0, 1).tolist()))


def _heats(job: Job, make: Callable[..., Method], longest: int) -> tuple[float, ...]:
    """The temperatures of the confidences, from the rounds of all prompts of the job."""
    method = make(calibrated.recorder(longest, CONFIDENCE_ROUNDS))
    sure, accepted = [], []
    for batch in batches(job):
        state = begin(job, method.drafter, method.params, *batch)
        after, _ = _generate(job, method, state, CONFIDENCE_ROUNDS)
        for own in jax.tree.leaves(after.draft, is_leaf=_is_recorded):
            if _is_recorded(own):
                known = np.asarray(own.accepted) >= 0
                sure.append(np.asarray(own.confidences)[known])
                accepted.append(np.asarray(own.accepted)[known])
    heats = calibration.fit(np.concatenate(sure), np.concatenate(accepted))
    return tuple(heats.tolist())


def _is_recorded(value: Any) -> bool:
    return isinstance(value, calibrated.Recorded)


def _run(job: Job, method: Method, state: DecodeState, length: int) -> _Sample:
    """Rounds with drafts of this length, after the state; it is copied, as a loop takes its own."""
    own = jax.tree.map(jnp.copy, state)
    own = jax.block_until_ready(own.replace(draft=with_length(own.draft, length)))
    began = time.perf_counter()
    after, records = _generate(job, method, own, ROUNDS)
    seconds = time.perf_counter() - began
    decode.check(sharding.on_host(after))
    records = sharding.fetch(records)
    drafted = np.asarray(records.drafted, int)
    ran = np.asarray(records.emitted, int).any(1) | drafted.any(1)
    rows = [True] * drafted.shape[1]
    counts = metrics.count(records, rows, method.drafter.longest)
    return _Sample(seconds / max(ran.sum(), 1), float(np.mean(drafted[ran].any(1))), counts)


def _generate(job: Job, method: Method, state: DecodeState, rounds: int) -> tuple:
    """At most so many rounds; the state and the records of the loop."""
    after, records = sharding.loops(job.mesh).generate(
        *(job.target, method.drafter, method.accept, method.params, state),
        max_steps=rounds,
        verify_widths=job.verify_widths,
    )
    jax.block_until_ready(after.tokens)
    return after, records


def with_length(draft_state: Any, length: int) -> Any:
    """A drafter's state with another length in its controllers ``fixed``."""
    return jax.tree.map(
        lambda x: x.replace(levels=jnp.full_like(x.levels, length)) if isinstance(x, Length) else x,
        draft_state,
        is_leaf=lambda x: isinstance(x, Length),
    )
