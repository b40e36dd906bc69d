"""Measures methods against plain decoding of the same model, with the same precision and batch.

Everything runs interleaved in one process: plain decoding and then every method over all prompts,
several times; the median counts. The cost of the parts of a round is sampled after every pass
(``specjax.bench.timing``), so that predicted and measured speed-up come from the same machine
state. The rows of results.json are made from the passes in ``specjax.bench.summaries``.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from specjax.bench import costs, passes, token_probs
from specjax.bench.passes import Job, Method, Pass
from specjax.bench.progress import Progress
from specjax.bench.timing import Clock
from specjax.errors import NonFiniteLogits, UserError

Task = Callable[[], object]


class Measured(NamedTuple):
    """All passes of a job: those of plain decoding, and of each method in order."""

    plain: list[Pass]
    methods: list[list[Pass]]


def warm(
    jobs: Sequence[Job], methods: Sequence[Method], also: Sequence[Task] = ()
) -> dict[str | None, float]:
    """Compiles every program that ``measure`` runs for these jobs, several at the same time.

    Compiling is most of the time of a short bench. ``also`` are further tasks for the same threads.

    Returns:
        Seconds to trace and compile the loop and the prefill of each method, by name (None: plain
        decoding), while other programs are compiled on the same cores.
    """
    _check_names(methods)
    seconds: dict[str | None, float] = {}
    shapes = {(job.batch_size, job.width): job for job in jobs}
    tasks = list(also)
    for job in shapes.values():
        for method in (None, *methods):
            tasks += [
                functools.partial(_compile_pass, job, method, seconds),
                functools.partial(_compile_clocks, job, method),
            ]
    for job in {job.width: job for job in shapes.values()}.values():
        tasks += _comparisons(job, methods)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()
    return seconds


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


def _comparisons(job: Job, methods: Sequence[Method]) -> Iterator[Task]:
    """Tasks that compile the comparison of target and draft probabilities."""
    text, width = [[0]] * min(8, len(job.prompts)), job.width + job.max_new_tokens
    for method in methods:
        drafter, params = passes.drafter_and_params(*passes.one_part(job, method))
        yield functools.partial(
            token_probs.compare,
            job.target,
            params,
            text,
            text,
            job.settings,
            drafter,
            width=width,
        )


def _check_names(methods: Sequence[Method]) -> None:
    """Raises UserError if two methods have one name: their measurements would be mixed."""
    names = [method.name for method in methods]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserError(f"two methods are called {twice[0]!r}; give every method its own name")


def measure(
    job: Job,
    methods: Sequence[Method],
    report: Callable[[str], None] = lambda _: None,
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
                label = method.name if method else "autoregressive"
                report(f"{label}, pass {repeat + 1} of {job.repeats}")
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
