"""Measures methods against plain decoding of the same model, with the same precision and batch.

Everything runs interleaved in one process: plain decoding and then every method over all prompts,
several times; the median counts. The cost of the parts of a round is sampled after every pass
(``specjax.bench.timing``), so that predicted and measured speed-up come from the same machine
state. The rows of results.json are made from the passes in ``specjax.bench.summaries``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specjax.bench import costs, passes
from specjax.bench.passes import Job, Method, Pass
from specjax.bench.progress import Progress
from specjax.bench.timing import Clock
from specjax.errors import NonFiniteLogits, UserError

Report = Callable[[str], None]


class Work(NamedTuple):
    """Something to do in any thread, and what it is called in messages."""

    name: str
    run: Callable[[], object]


class Measured(NamedTuple):
    """All passes of a job: those of plain decoding, and of each method in order."""

    plain: list[Pass]
    methods: list[list[Pass]]


def warm(
    jobs: Sequence[Job], methods: Sequence[Method], report: Report = lambda _: None
) -> dict[str | None, float]:
    """Compiles every program that ``measure`` runs for these jobs, several at the same time.

    Compiling is most of the time of a short bench. ``report`` is called with a status message.

    Returns:
        Seconds to trace and compile the loop and the prefill of each method, by name (None: plain
        decoding), while other programs are compiled on the same cores.
    """
    _check_names(methods)
    seconds: dict[str | None, float] = {}
    shapes = {(job.batch_size, job.width): job for job in jobs}
    tasks: list[Work] = []
    for job in shapes.values():
        for number, method in enumerate((None, *methods)):
            name = _spell(methods, number)
            tasks += [
                Work(f"loop of {name}", functools.partial(_compile_pass, job, method, seconds)),
                Work(f"clocks of {name}", functools.partial(_compile_clocks, job, method)),
            ]
    together(tasks, "compiling", report)
    return seconds


def together(tasks: Sequence[Work], what: str, report: Report = lambda _: None) -> None:
    """Runs the tasks in as many threads as there are cores; ``what`` begins the status messages.

    After an error those that have not begun are dropped. After an interrupt it also does not wait
    for those that have: a compilation cannot be stopped.
    """
    begun = itertools.count(1)

    def run(task: Work) -> None:
        report(f"{what}, {next(begun)} of {len(tasks)}: {task.name}")
        task.run()
        _trim()

    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
        for done in [pool.submit(run, task) for task in tasks]:
            done.result()
    except BaseException as error:
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    pool.shutdown()


def _trim() -> None:
    """Gives freed memory back to the system: each compilation leaves hundreds of megabytes.

    With the C library of most Linux systems; nothing elsewhere.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _spell(methods: Sequence[Method], number: int) -> str:
    """A method in a status message; number 0 is plain decoding."""
    if not number:
        return "plain decoding"
    return f"{methods[number - 1].name} (method {number} of {len(methods)})"


def _compile_pass(job: Job, method: Method | None, seconds: dict[str | None, float]) -> None:
    """Compiles prefill and loop, and adds the time to the method's entry of ``seconds``."""
    began = time.perf_counter()
    passes.run_pass(job, method, brief=True)
    name = None if method is None else method.name
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began


def _compile_clocks(job: Job, method: Method | None) -> None:
    job, method = passes.one_part(job, method)
    drafter, params = passes.drafter_and_params(job, method)
    state = passes.begin(job, drafter, params, *next(passes.batches(job)), brief=True)
    for clock in costs.clocks(job, method).values():
        clock.compile(params, state)


def _check_names(methods: Sequence[Method]) -> None:
    """Raises UserError if two methods have one name: their measurements would be mixed."""
    names = [method.name for method in methods]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserError(f"two methods are called {twice[0]!r}; give every method its own name")


def measure(
    job: Job,
    methods: Sequence[Method],
    report: Report = lambda _: None,
    progress: Progress | None = None,
    name: str = "",
) -> Measured:
    """``job.repeats`` passes of plain decoding and of every method, interleaved.

    Call ``warm`` first; otherwise the first passes include compilation.

    Args:
        job: the prompts and settings.
        methods: their names must differ.
        report: is called with a status message before every pass.
        progress: stored passes are taken from it instead of run; new passes are stored in it.
        name: identifies this job in ``progress``.

    Raises:
        UserError: two methods of one name.
        NonFiniteLogits: with the name of the method.
    """
    _check_names(methods)
    progress = Progress() if progress is None else progress
    entries = list(enumerate((None, *methods)))
    parts = [costs.clocks(job, method) for _, method in entries]
    results: list[list[Pass]] = [[] for _ in entries]
    for repeat in range(job.repeats):
        # Rotate the order: no method always runs first.
        first = repeat % len(entries)
        for index, method in entries[first:] + entries[:first]:
            key = f"{name}, pass {repeat + 1}, method {index}"
            stored = progress.get(key)
            if stored is None:
                report(f"pass {repeat + 1} of {job.repeats}: {_spell(methods, index)}")
                # Another seed for every pass: more text for the check of sampled outputs.
                seeded = job._replace(seed=job.seed + repeat)
                stored = passes.to_json(_timed_pass(seeded, method, parts[index]))
                progress.put(key, stored)
            results[index].append(passes.from_json(stored))
    return Measured(results[0], results[1:])


def _timed_pass(job: Job, method: Method | None, parts: dict[str, Clock]) -> Pass:
    """A pass with the costs of the parts of its rounds. Raises NonFiniteLogits."""
    try:
        one = passes.run_pass(job, method)
    except NonFiniteLogits as error:
        name = method.name if method else "plain decoding"
        raise NonFiniteLogits(f"{name}: {error}") from None
    return one._replace(costs=costs.of_pass(job, method, parts, one))
