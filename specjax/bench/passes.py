"""Measures methods against plain decoding of the same model, at the same precision and batch, interleaved in one process.

A measurement is a turn-taking: plain decoding and then every method over all prompts; there are several turns and the median
counts. Only the decode loop is timed: prefill, compilation and transfers are outside, for both sides, and reported by
themselves. What the parts of a round cost is sampled after every pass (``specjax.timing``), so that the predicted speed-up
and the measured one saw the same machine. Rows are made in ``specjax.rows``.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, rng, sampling
from specjax.bench import metrics, timing
from specjax.bench.progress import Progress
from specjax.bench.token_probs import views
from specjax.drafters import none
from specjax.errors import NonFiniteLogits
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams

BRIEF = 4  # tokens: memory that was never touched makes the first rounds of a program several times slower


class Method(NamedTuple):
    """One thing to measure."""

    name: str
    drafter: Drafter
    accept: Accept
    params: ModelParams
    warm: bool = False  # whether it learns from other prompts before it is measured


class Job(NamedTuple):
    """What all methods are measured on."""

    target: LM
    params: Any
    prompts: Sequence[Sequence[int]]
    settings: dict  # of sampling.make_sampling
    batch_size: int
    max_new_tokens: int
    eos_id: tuple[int, ...]
    seed: int
    repeats: int
    name: str | None = None  # of the prompt set
    categories: Sequence[str | None] = ()  # of the prompts
    spell: Callable[[list[int]], str] | None = None  # token ids to text

    @property
    def width(self) -> int:
        """The longest prompt."""
        return max(map(len, self.prompts))


class Pass(NamedTuple):
    """One run over all prompts. Lists have an entry for each prompt."""

    outputs: list[list[int]]
    counts: list[metrics.Counts]  # empty for plain decoding
    emitted: list[list[int]]  # tokens of every round
    seconds: list[float]  # in the compiled loop, of the prompt's batch
    walls: list[
        float
    ]  # from the prompt's batch to its tokens on the host: prefill, loop, transfers
    prefill: float  # seconds, all batches together, as the next two
    loop: float
    host: float  # around the compiled programs: packing, dispatch, fetching tokens and records
    loops: int  # times the compiled loop went round
    costs: dict[str, float] = {}  # noqa: RUF012  (never mutated) seconds of "step", or of "draft" and "verify"

    @property
    def tokens(self) -> int:
        """Tokens emitted."""
        return sum(map(len, self.outputs))


def batches(job: Job) -> Iterator[tuple[list[int], list[list[int]]]]:
    """(row numbers, prompts) of each batch; the last is filled up with rows that are finished from the start (-1)."""
    for start in range(0, len(job.prompts), job.batch_size):
        rows = list(range(start, min(start + job.batch_size, len(job.prompts))))
        rows += [-1] * (job.batch_size - len(rows))
        yield rows, [list(job.prompts[max(r, 0)]) for r in rows]


def begin(
    job: Job, drafter: Drafter, params: ModelParams, rows, prompts, *, brief: bool = False
) -> DecodeState:
    """The state before the first round. ``brief`` stops every row after a few tokens: enough to compile and to warm up."""
    packed, lengths = decode.pack_prompts(prompts, job.width)
    new = np.where(
        np.asarray(rows) < 0, 0, min(BRIEF, job.max_new_tokens) if brief else job.max_new_tokens
    )
    keys = rng.row_keys(job.seed, [r if r >= 0 else len(job.prompts) for r in rows])
    return decode.prefill(
        job.target,
        drafter,
        params,
        packed,
        lengths,
        keys,
        max_len=job.width + job.max_new_tokens,
        limit=lengths + jnp.asarray(new, jnp.int32),
        sampling=sampling.make_sampling(len(rows), **job.settings),
    )


def run_pass(job: Job, method: Method | None, *, brief: bool = False) -> Pass:
    """Decodes all prompts with ``method``, or plainly if it is None. Raises NonFiniteLogits."""
    drafter, params = _pair(job, method)
    found = Pass([], [], [], [], [], 0.0, 0.0, 0.0, 0)
    for rows, prompts in batches(job):
        clock = [time.perf_counter()]
        state = jax.block_until_ready(begin(job, drafter, params, rows, prompts, brief=brief))
        clock.append(time.perf_counter())
        records = None
        if method is None:
            state = decode.autoregressive(
                job.target, params, state, max_steps=job.max_new_tokens, eos_id=job.eos_id
            )
        else:
            state, records = decode.generate(
                job.target,
                drafter,
                method.accept,
                params,
                state,
                max_steps=job.max_new_tokens,
                eos_id=job.eos_id,
            )
        jax.block_until_ready(state.tokens)
        clock.append(time.perf_counter())
        decode.check(state)
        outputs = decode.outputs(state, [len(p) for p in prompts])
        records = None if records is None else jax.device_get(records)
        clock.append(time.perf_counter())
        real = [i for i, r in enumerate(rows) if r >= 0]
        if records is None:
            emitted, counts = [[1] * len(outputs[i]) for i in real], []
            loops = max(map(len, outputs))
        else:
            alone = [[i == j for j in range(len(rows))] for i in real]
            counts = [metrics.count(records, only, drafter.longest) for only in alone]
            emitted = [[int(n) for n in records.emitted[:, i] if n] for i in real]
            loops = int(records.emitted.any(1).sum())
        prefill, loop, host = np.diff(clock).tolist()
        found = found._replace(
            outputs=found.outputs + [outputs[i] for i in real],
            counts=found.counts + counts,
            emitted=found.emitted + emitted,
            seconds=found.seconds + [loop] * len(real),
            walls=found.walls + [prefill + loop + host] * len(real),
            prefill=found.prefill + prefill,
            loop=found.loop + loop,
            host=found.host + host,
            loops=found.loops + loops,
        )
        if brief:
            break  # one batch compiles everything
    return found


def _pair(job: Job, method: Method | None) -> tuple[Drafter, ModelParams]:
    """Drafter and parameters; those of plain decoding for None."""
    return (
        (none.make(job.target), ModelParams(job.params))
        if method is None
        else (method.drafter, method.params)
    )


def teach(job: Job, method: Method, prompts: Sequence[Sequence[int]]) -> Method:
    """The method after decoding other prompts and learning from them, if it is one that does: untimed, and then it stays as
    it is, so that no measured prompt profits from another and their order does not matter."""
    learn = method.drafter.learn
    if not method.warm or learn is None:
        return method
    # Noise that no measured pass uses.
    lesson = job._replace(prompts=prompts, seed=job.seed + job.repeats)
    for rows, ids in batches(lesson):
        state = begin(lesson, method.drafter, method.params, rows, ids)
        state, _ = decode.generate(
            job.target,
            method.drafter,
            method.accept,
            method.params,
            state,
            max_steps=job.max_new_tokens,
            eos_id=job.eos_id,
        )
        decode.check(state)
        method = method._replace(
            params=method.params._replace(draft=learn(method.params, state, [len(i) for i in ids]))
        )
    return method


# What the parts of a round cost. ------------------------------------------------------------------------------------


def clocks(job: Job, method: Method | None) -> dict[str, timing.Clock]:
    """The clocks of a method: "draft" and "verify"; of plain decoding "step"; none if nothing is drafted, or if what a draft
    costs depends on the text."""
    if method is None:
        return {"step": timing.of_pass(job.target, 1)}
    if not method.drafter.nodes or not method.drafter.constant_cost:
        return {}
    return {
        "draft": timing.of_draft(method.drafter),
        "verify": timing.of_verify(job.target, method.drafter),
    }


def sample(job: Job, method: Method | None, parts: dict[str, timing.Clock]) -> dict[str, float]:
    """Seconds of each part, sampled once behind the first batch of prompts."""
    if not parts:
        return {}
    drafter, params = _pair(job, method)
    state = jax.block_until_ready(begin(job, drafter, params, *next(batches(job))))
    return {name: clock.sample(params, state) for name, clock in parts.items()}


def time_of_verify(job: Job, method: Method | None, size: int, samples: int = 5) -> float:
    """Seconds of one target pass over a chain of ``size`` tokens per row, in the buffers of that method (None: of plain
    decoding); median."""
    parts = {"pass": timing.of_pass(job.target, size)}
    return statistics.median(sample(job, method, parts)["pass"] for _ in range(samples))


def time_of_draft(job: Job, method: Method, samples: int = 5) -> float:
    """Seconds of one call of the drafter's ``propose``; median."""
    parts = {"draft": timing.of_draft(method.drafter)}
    return statistics.median(sample(job, method, parts)["draft"] for _ in range(samples))


# Measuring ----------------------------------------------------------------------------------------------------------


def warm(
    jobs: Sequence[Job], methods: Sequence[Method], also: Sequence[Callable[[], object]] = ()
) -> dict[str | None, float]:
    """Compiles every program that ``measure`` runs for these jobs, several at once: most of a short bench.

    Returns how many seconds each method's loop and prefill took to trace and compile (None: plain decoding's), with others
    beside it on the same cores.
    """
    seconds: dict[str | None, float] = {}

    def compiled(job: Job, method: Method | None) -> None:
        began = time.perf_counter()
        run_pass(job, method, brief=True)
        name = None if method is None else method.name
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    def timed(job: Job, method: Method | None) -> None:
        drafter, params = _pair(job, method)
        state = begin(job, drafter, params, *next(batches(job)), brief=True)
        for clock in clocks(job, method).values():
            clock.compile(params, state)

    work: list[Callable[[], object]] = list(also)
    shapes = {(job.batch_size, job.width): job for job in jobs}
    for job in shapes.values():
        for method in (None, *methods):
            work += [
                functools.partial(compiled, job, method),
                functools.partial(timed, job, method),
            ]
    for job in {job.width: job for job in shapes.values()}.values():
        text = [[0]] * min(8, len(job.prompts))
        for m in methods:
            look = functools.partial(
                views, job.target, m.params, text, text, job.settings, m.drafter
            )
            work.append(functools.partial(look, width=job.width + job.max_new_tokens))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(task) for task in work]:
            done.result()
    return seconds


class Measured(NamedTuple):
    """All passes of a job: those of plain decoding, and of each method in order."""

    plain: list[Pass]
    methods: list[list[Pass]]


def measure(
    job: Job,
    methods: Sequence[Method],
    say: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
    name: str = "",
) -> Measured:
    """``job.repeats`` passes of plain decoding and of every method, interleaved. Raises NonFiniteLogits.

    Call ``warm`` first, or the first pass compiles.

    Args:
        job: the prompts and settings.
        methods: what is measured; their names differ.
        say: is told how far it is.
        progress: passes measured before a kill are taken from there, and new ones put there.
        name: tells this job from others in ``progress``.
    """
    progress = Progress() if progress is None else progress
    parts = [clocks(job, method) for method in (None, *methods)]
    found: list[list[Pass]] = [[] for _ in parts]
    for turn in range(job.repeats):
        order = list(enumerate((None, *methods)))
        order = order[turn % len(order) :] + order[: turn % len(order)]  # nobody is always first
        for index, method in order:
            key = f"{name}, pass {turn + 1}, method {index}"
            if (known := progress.get(key)) is None:
                say(
                    f"{method.name if method else 'autoregressive'}, pass {turn + 1} of {job.repeats}"
                )
                # Another seed each time: more text to judge sampled output by.
                now = job._replace(seed=job.seed + turn)
                try:
                    one = run_pass(now, method)
                except NonFiniteLogits as error:
                    raise NonFiniteLogits(
                        f"{method.name if method else 'plain decoding'}: {error}"
                    ) from None
                known = to_json(one._replace(costs=sample(now, method, parts[index])))
                progress.put(key, known)
            found[index].append(from_json(known))
    return Measured(found[0], found[1:])


def to_json(one: Pass) -> dict:
    """A pass as JSON knows it."""
    plain = [
        {key: np.asarray(value).tolist() for key, value in c._asdict().items()} for c in one.counts
    ]
    return one._asdict() | {"counts": plain}


def from_json(value: dict) -> Pass:
    """The pass that ``to_json`` was given."""
    counts = [
        metrics.Counts(
            c["tokens"],
            c["rounds"],
            c["accepted"],
            np.array(c["tested"], int),
            np.array(c["passed"], int),
        )
        for c in value["counts"]
    ]
    kept: dict[str, Any] = value | {"counts": counts}
    return Pass(**kept)
