"""Measures the cells of a bench and shows the results: for mode bench, and for Python.

A cell is a job with its prompts and methods: one temperature, batch size, prompt set, length of
prompts and length of outputs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.text import Text

from specjax.bench import (
    measuring,
    passes,
    proofs,
    results,
    summaries,
    token_traces,
    uncertainty,
)
from specjax.bench.measuring import Programs
from specjax.data import progress
from specjax.data.prompts import PromptSet
from specjax.models import hf
from specjax.report import advice, columns, terminal
from specjax.run import build, workdirs
from specjax.run import settings as run_settings
from specjax.run.settings import Settings


class NotLossless(Exception):
    """A method that claims to be lossless failed its check."""


class Cell(NamedTuple):
    """One cell of the grid: a job, its prompts, and the methods (``_taught`` gives them texts)."""

    job: passes.Job
    prompts: PromptSet
    methods: list[passes.Method]
    name: str
    uncut: bool  # whether the prompts are as in the file, not cut to a context length


class _Traced(NamedTuple):
    """A continuation to trace."""

    cell: Cell
    method: passes.Method
    number: int  # of the prompt


class Parts:
    """The seconds of the parts of a bench, in the order in which they first began."""

    def __init__(self):
        self._began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time inside to the part of this name."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def first_row(self) -> None:
        """Notes when the first row was there."""
        self.seconds.setdefault("to the first row", time.perf_counter() - self._began)


def grid(
    settings: Settings,
    target: hf.Loaded,
    methods: list[passes.Method],
    chosen: PromptSet,
    more: Sequence[str] = (),
    uncut: bool = True,
) -> list[Cell]:
    """A cell for each temperature, batch size and length; ``more`` is added to their names.

    Raises UserError.
    """
    result, several = [], len(settings.new_tokens) > 1
    axes = settings.temperatures, settings.batch_sizes, settings.new_tokens
    for temperature, batch_size, new in itertools.product(*axes):
        job = build.job(settings, target, chosen, temperature, batch_size, new)
        parts = [f"temperature {temperature:g}", f"batch {batch_size}", *more]
        parts += [f"{new} new tokens"] * several
        result.append(Cell(job, chosen, methods, ", ".join(parts), uncut))
    return result


class Bench(NamedTuple):
    """What all parts of a bench share."""

    settings: run_settings.Settings
    console: Console
    done: progress.Progress
    proven: Sequence[proofs.Proof]
    parts: Parts


class Results(NamedTuple):
    """What was measured."""

    rows: list[dict]  # of results.json
    traces: list[dict]  # of trace.jsonl
    passes: list[tuple[Cell, measuring.Measured]]


def measure(cells: Sequence[Cell], bench: Bench, label: str | None = None) -> Results:
    """Measures every cell with every method, and prints each row as soon as it is measured.

    ``label`` is that of another target than the configuration's. Raises NonFiniteLogits and
    UserError.
    """
    settings, console, done, proven, parts = bench
    overlaps = settings.report and settings.trace_prompts != 0
    found: dict[int, tuple[measuring.Measured, list[dict]]] = {}
    with terminal.Status(console, "warm drafters learn") as status:
        with parts.part("learning"):
            cells = [_taught(cell) for cell in cells]
        made = Programs(cells[0].methods)
        for number in _by_shape(cells):
            cell = cells[number]
            report = status.part(cell.name)
            with parts.part("compiling"):
                made.warm(cell.job, report)
            with parts.part("decoding"):
                name = f"{label or ''}setting {number}"
                one = measuring.measure(cell.job, cell.methods, report, done, name)
            found[number] = one, []
            for method, runs in zip(cell.methods, one.methods, strict=True):
                report(f"checking {method.name}")
                with parts.part("checking"):
                    compared = (cell.job, method, runs, one.plain)
                    own = summaries.rows_of(*compared, by_definition=overlaps, proven=proven)
                parts.first_row()
                console.print(Text.assemble((f"{cell.name}: ", "dim"), terminal.line(own[0])))
                found[number][1].extend(own)
        with parts.part("tracing"):
            traces = _traces(_traced(cells, settings), status.update)
    order = range(len(cells))
    rows = [row for number in order for row in found[number][1]]
    # Now all shapes are compiled.
    more = [{"compile_seconds": made.seconds.get(row["method"]), "target": label} for row in rows]
    rows = [row | own for row, own in zip(rows, more, strict=True)]
    return Results(rows, traces, [(cells[number], found[number][0]) for number in order])


def _traces(traced: Sequence[_Traced], report: measuring.Report) -> list[dict]:
    """The traces; their programs are compiled now, several at the same time."""
    # Of each shape the first: the others run the same program.
    tasks = {}
    for cell, method, _ in reversed(traced):
        task = functools.partial(token_traces.compile, cell.job, method)
        tasks[id(method.drafter), cell.job.width] = method.name, task
    measuring.together([*tasks.values()], "compiling traces", report)
    result = []
    for place, (cell, method, number) in enumerate(traced, 1):
        report(f"tracing, {place} of {len(traced)}: {method.name}")
        result.append(token_traces.record(cell.job, method, number))
    return result


def _by_shape(cells: Sequence[Cell]) -> list[int]:
    """The numbers of the cells; those that have the same programs follow each other."""
    jobs = [cell.job for cell in cells]
    shapes = [(job.batch_size, job.width, job.max_new_tokens) for job in jobs]
    return sorted(range(len(cells)), key=lambda number: shapes.index(shapes[number]))


def _taught(cell: Cell) -> Cell:
    others = [prompt.ids for prompt in cell.prompts.others]
    return cell._replace(methods=[passes.teach(cell.job, m, others) for m in cell.methods])


def _traced(cells: Sequence[Cell], settings: Settings) -> list[_Traced]:
    """What to trace: the first prompts of the first cell of each temperature, with every method.

    Only one continuation if only the terminal shows it.
    """
    prompts = int(settings.report) if settings.trace_prompts is None else settings.trace_prompts
    first = {cell.job.settings["temperature"]: cell for cell in reversed(cells)}
    first = {key: _longer(cell, settings.trace_tokens) for key, cell in first.items()}
    result = [
        _Traced(cell, method, number)
        for cell in list(first.values())[::-1]
        for method in cell.methods
        for number in range(min(prompts, len(cell.job.prompts)))
    ]
    if settings.show_trace and not result:
        cell = next(reversed(first.values()))
        method = next((m for m in cell.methods if m.drafter.nodes), cell.methods[0])
        result = [_Traced(cell, method, 0)]
    return result


def _longer(cell: Cell, tokens: int) -> Cell:
    """The cell with texts of at least ``tokens`` new tokens, or as many as the model has room for.

    A short measured text is the beginning of the traced one: a row does not depend on its limit.
    """
    job = cell.job
    positions = job.target.max_positions
    room = tokens if positions is None else min(tokens, positions - job.width)
    return cell._replace(job=job._replace(max_new_tokens=max(job.max_new_tokens, room)))


def note_proofs(bench: Bench, methods: Sequence[passes.Method]) -> None:
    """Prints a line for each proof that proves nothing here."""
    measured = [each for method in methods for each in (method.drafter, method.accept)]
    for line in proofs.unused(bench.proven, measured):
        bench.console.print(Text(f"notice: {line}"))


def write(
    bench: Bench,
    workdir: Path,
    measured: Results,
    files: Mapping[str, str] | None = None,
    targets: Sequence[dict] | None = None,
    **more: Any,
) -> Path:
    """Writes results.json, what is beside it (``files``: name -> text) and the report; prints the
    table. Returns the path of results.json. Raises UserError.

    ``targets`` and ``more`` are further keys of results.json.
    """
    settings, console, seconds = bench.settings, bench.console, bench.parts.seconds
    own, rows, peak = dict(files or {}), measured.rows, results.peak_bytes()
    if measured.traces:
        own["trace.jsonl"] = "".join(json.dumps(trace) + "\n" for trace in measured.traces)
    curves = results.curves(rows)
    path = workdirs.write(
        settings,
        workdir,
        rows,
        files=own,
        repeats=settings.repeats,
        uncertainty=uncertainty.ABOUT,
        seconds=seconds,
        processes=jax.process_count(),
        peak_bytes=peak,
        curves=curves,
        targets=targets,
        **more,
    )
    console.print(terminal.table(rows))
    console.print(
        "[dim]tau: tokens per round; loops: repeated 4-grams of the outputs; "
        "alpha: acceptance rate; plain: our autoregressive tokens/s, same batch; speed-up: "
        f"tokens/s over plain, median of {settings.repeats} interleaved passes; pred: predicted "
        "speed-up; eff: speed-up over pred[/dim]"
    )
    for note in (*terminal.notes(rows), *terminal.curves(curves), *terminal.targets(targets or ())):
        console.print(Text(note, "dim"))
    for line in advice.lines(rows):
        console.print(Text(line))
    spent = [f"{name} {value:.0f}" for name, value in seconds.items() if value >= 1]
    most = "" if peak is None else f"; at most {peak / 1e9:.2f} GB of memory"
    console.print(Text(f"seconds: {', '.join(spent)}{most}", "dim"))
    if settings.show_trace:
        show_trace(console, measured.traces)
    write_report(console, path, rows, draw=settings.report)
    return path


def check_lossless(rows: Sequence[dict]) -> None:
    """Raises NotLossless if a row that claims to be lossless failed its check."""
    for row in rows:
        if results.breaks_its_claim(row):
            detail = "; ".join(filter(None, (row["lossless"]["detail"], columns.near_ties(row))))
            raise NotLossless(f"{row['method']} is not lossless: {detail}; see results.json")


def show_trace(console, traces: Sequence[dict]) -> None:
    """Prints the first continuation that has a draft, coloured by the origin of each token."""
    drafted = (t for t in traces if any(one["draft"] for one in t["rounds"]))
    shown = next(drafted, traces[0])
    head = f", temperature {shown['temperature']:g}: "
    console.print(Text.assemble("\n", (shown["method"], "bold"), head), end="")
    colours = terminal.has_colours(console)
    console.print(terminal.legend(colours))
    console.print(terminal.trace(shown, colours))


def write_report(console, path: Path, rows: Sequence[dict], *, draw: bool) -> None:
    """Writes report.html and plots/ beside results.json if ``draw``; prints what was written."""
    lines = [f"wrote {path}"]
    if draw:
        # Imported here because matplotlib takes a second to import.
        from specjax.report import html, plots

        with terminal.Status(console, "drawing the plots"):
            plots.save(plots.draw(rows), path.parent / "plots")
            report, notices = html.build(path)
        lines = [*(f"notice: {notice}" for notice in notices), *lines, f"wrote {report}"]
    for line in lines:
        console.print(Text(line, "dim"))
