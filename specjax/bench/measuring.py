"""Measures methods against plain decoding of the same model, with the same precision and batch.

Everything runs interleaved in one process: each batch of prompts is decoded plainly and by every
method, and all batches several times; the median counts. The cost of the parts of a round is
sampled after every pass (``specjax.bench.timing``), so that predicted and measured speed-up come
from the same machine state. The rows of results.json are made from the passes in
``specjax.bench.summaries``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from specjax import tree
from specjax.bench import passes, timing
from specjax.bench.passes import Job, Method, Pass
from specjax.bench.timing import Clock
from specjax.data.progress import Progress
from specjax.errors import NonFiniteLogits, UserError

Report = Callable[[str], None]
# What it is called in messages, and something to do in any thread.
Task = tuple[str, Callable[[], object]]


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
    shapes = {_shape(job): job for job in jobs}
    tasks: list[Task] = []
    for job in shapes.values():
        for number, method in enumerate((None, *methods)):
            run = functools.partial(_compile_pass, job, method, seconds)
            tasks.append((f"loop of {_spell(methods, number)}", run))
        # One after the other: methods share passes of the target.
        tasks.append(("clocks", functools.partial(_compile_clocks, job, methods)))
    together(tasks, "compiling", report)
    return seconds


def _shape(job: Job) -> tuple[int, ...]:
    """What programs are compiled for: rows, and the slots of their texts."""
    return job.batch_size, job.width, job.max_new_tokens


def together(tasks: Sequence[Task], what: str, report: Report = lambda _: None) -> None:
    """Runs the tasks in as many threads as there are cores; ``what`` begins the status messages.

    With several processes in one thread, since all must run programs in the same order.

    After an error those that have not begun are dropped. After an interrupt it also does not wait
    for those that have: a compilation cannot be stopped.
    """
    begun = itertools.count(1)

    def run(name: str, task: Callable[[], object]) -> None:
        report(f"{what}, {next(begun)} of {len(tasks)}: {name}")
        task()
        _trim()

    threads = os.cpu_count() if jax.process_count() == 1 else 1
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    try:
        for done in [pool.submit(run, *task) for task in tasks]:
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


def _compile_clocks(job: Job, methods: Sequence[Method]) -> None:
    for each in (None, *methods):
        own, method = passes.one_part(job, each)
        if not (parts := clocks(own, method)):
            continue
        drafter, params = passes.drafter_and_params(own, method)
        state = passes.begin(own, drafter, params, *next(passes.batches(own)), brief=True)
        for clock in parts.values():
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
    """``job.repeats`` passes of plain decoding and of every method, interleaved batch by batch.

    Call ``warm`` first; otherwise the first passes include compilation.

    Args:
        job: the prompts and settings.
        methods: their names must differ.
        report: is called with a status message before every batch.
        progress: stored batches are taken from it instead of run; new ones are stored in it.
        name: identifies this job in ``progress``.

    Raises:
        UserError: two methods of one name.
        NonFiniteLogits: with the name of the method.
    """
    _check_names(methods)
    progress = Progress() if progress is None else progress
    entries = list(enumerate((None, *methods)))
    parts = [clocks(job, method) for _, method in entries]
    groups = list(passes.batches(job))
    results: list[list[Pass]] = [[] for _ in entries]
    for repeat in range(job.repeats):
        # Another seed for every pass: more text for the check of sampled outputs.
        seeded = job._replace(seed=job.seed + repeat)
        ran = [passes.NOTHING for _ in entries]
        for number, group in enumerate(groups, 1):
            # Rotate the order: no method always runs first.
            first = (repeat + number) % len(entries)
            for index, method in entries[first:] + entries[:first]:
                key = f"{name}, pass {repeat + 1}, batch {number}, method {index}"
                stored = progress.get(key)
                if stored is None:
                    where = f"pass {repeat + 1} of {job.repeats}, batch {number} of {len(groups)}"
                    report(f"{where}: {_spell(methods, index)}")
                    one = _run(seeded, method, group)
                    if number == len(groups):
                        whole = ran[index].plus(one)
                        one = one._replace(costs=costs_of_pass(job, method, parts[index], whole))
                    stored = passes.to_json(one)
                    progress.put(key, stored)
                one = passes.from_json(stored)
                ran[index] = ran[index].plus(one)._replace(costs=one.costs)
        for own, one in zip(results, ran, strict=True):
            own.append(one)
    return Measured(results[0], results[1:])


def _run(job: Job, method: Method | None, group: passes.Batch) -> Pass:
    """One batch. Raises NonFiniteLogits with the name of the method."""
    try:
        return passes.run_batch(job, method, *group)
    except NonFiniteLogits as error:
        name = method.name if method else "plain decoding"
        raise NonFiniteLogits(f"{name}: {error}") from None


VERIFY = "verify "  # the clock of one width is "verify 6"


def clocks(job: Job, method: Method | None) -> dict[str, Clock]:
    """The clocks of a method, or of plain decoding (None), "step".

    Those of a method are "draft" and one for each width that its rounds may verify. There are none
    if a method drafts nothing, or if the cost of a draft depends on the text.
    """
    job, method = passes.one_part(job, method)
    if method is None:
        return {"step": timing.of_pass(job.target, 1)}
    if not method.drafter.nodes or not method.drafter.constant_cost:
        return {}
    widths = tree.widths(method.drafter, job.verify_widths)
    verify = {
        f"{VERIFY}{width}": timing.of_verify(job.target, method.drafter, width) for width in widths
    }
    return {"draft": timing.of_draft(method.drafter), **verify}


def sample(job: Job, method: Method | None, parts: dict[str, Clock]) -> dict[str, float]:
    """Seconds of each part, one sample, after the prompts of the first batch.

    On a mesh: on the devices of one part of its rows, as all parts run at the same time.
    """
    if not parts:
        return {}
    job, method = passes.one_part(job, method)
    drafter, params = passes.drafter_and_params(job, method)
    state = jax.block_until_ready(passes.begin(job, drafter, params, *next(passes.batches(job))))
    return {name: clock.sample(params, state) for name, clock in parts.items()}


def costs_of_pass(
    job: Job, method: Method | None, parts: dict[str, Clock], one: Pass
) -> dict[str, float]:
    """Seconds of "step", or of "draft" and "verify", for the rounds of this pass.

    The cost of verification is the mean over its rounds: each costs what its width costs.
    """
    ran = {f"{VERIFY}{width}": count for width, count in one.widths.items()}
    used = [name for name in parts if name in ran or not name.startswith(VERIFY)]
    seconds = sample(job, method, {name: parts[name] for name in used})
    result = {name: value for name, value in seconds.items() if name not in ran}
    if parts and ran:
        total = sum(seconds[name] * count for name, count in ran.items())
        result["verify"] = total / sum(ran.values())
    return result


def time_of_verify(job: Job, method: Method | None, size: int, samples: int = 5) -> float:
    """Median seconds of one target pass over a chain of ``size`` tokens per row.

    The buffers are those of the method, or of plain decoding (None).
    """
    return _median(job, method, timing.of_pass(job.target, size), samples)


def time_of_draft(job: Job, method: Method, samples: int = 5) -> float:
    """Median seconds of one call of the drafter's ``propose``."""
    return _median(job, method, timing.of_draft(method.drafter), samples)


def _median(job: Job, method: Method | None, clock: Clock, samples: int) -> float:
    return statistics.median(sample(job, method, {"": clock})[""] for _ in range(samples))


MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
SHARE = 0.9  # of the allowed maps that may be used


def maps() -> int:
    """The memory maps of this process; 0 where that is not known."""
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


def most_maps() -> float:
    """How many maps may be used."""
    return SHARE * int(MOST_MAPS.read_text()) if MOST_MAPS.exists() else float("inf")


class Programs:
    """The compiled programs of some methods, for jobs of any shape.

    On a CPU every compiled program adds hundreds of memory maps to the process, and Linux allows
    65,530 of them by default; beyond, the compiler ends the process. So they are released where
    memory maps run out.
    """

    def __init__(self, methods: Sequence[Method]):
        self._methods = methods
        self._shapes: set[tuple[int, ...]] = set()
        self._before = maps()  # when the programs of the newest shape were not compiled
        self._largest = 0  # maps that one shape added, with what was compiled to check its rows
        # Seconds to trace and compile the loop and the prefill of each method (None: plain).
        self.seconds: dict[str | None, float] = {}

    def warm(self, job: Job, report: Report = lambda _: None) -> None:
        """Compiles what ``measuring.measure`` runs for this job, unless it is there already.

        ``report`` is called with a status message.
        """
        shape = _shape(job)
        if shape in self._shapes:
            return
        now = maps()
        self._largest = max(self._largest, now - self._before)
        if now + self._largest > most_maps():
            # All compiled programs are forgotten.
            jax.clear_caches()
            gc.collect()
            self._shapes.clear()
            now = maps()
        self._before = now
        for name, seconds in warm([job], self._methods, report).items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._shapes.add(shape)
