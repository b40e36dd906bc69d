"""Mode bench: methods x temperatures x batch sizes x prompt sets x context lengths.

Writes into the workdir: results.json, config.json, metrics.jsonl, trace.jsonl, answers/ (one file
per method and setting, in Spec-Bench's format), plots/ and report.html. A bench that was killed is
resumed by the same command.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from specjax.bench import answers, measuring, passes, progress, results, summaries, token_traces
from specjax.data import prompts as prompts_lib
from specjax.data.prompts import Prompt, PromptSet
from specjax.errors import NonFiniteLogits, UserError
from specjax.models import hf
from specjax.report import terminal
from specjax.run import build
from specjax.run.resolve import Settings


class NotLossless(Exception):
    """A method that claims to be lossless failed its check."""


class Cell(NamedTuple):
    """One cell of the grid: a job, its prompts, and the methods (``_taught`` gives them texts)."""

    job: passes.Job
    prompts: PromptSet
    methods: list[passes.Method]
    name: str
    uncut: bool  # whether the prompts are as in the file, not cut to a context length


class Traced(NamedTuple):
    """A continuation to trace."""

    cell: Cell
    method: passes.Method
    number: int  # of the prompt


def bench(settings: Settings, workdir: Path, command: str | None) -> None:
    """Measures every method against plain decoding; prints a table, writes results and report.

    Raises:
        UserError: settings that do not fit.
        NotLossless: after everything is written.
    """
    console = terminal.console()
    target = build.target(settings)
    methods = build.methods(settings, target, settings.bench.temperatures)
    with console.status("reading prompts"):
        cells = _cells(settings, target, methods)
    ids = [p.ids for cell in cells for p in (*cell.prompts.prompts, *cell.prompts.others)]
    mark = progress.fingerprint(json.loads(settings.config_json), ids)
    done = progress.Progress(workdir, mark)
    if len(done):
        console.print(f"[dim]resuming after {len(done)} passes that were measured before[/dim]")
    try:
        rows, traces, texts = _measure(settings, cells, target, done, console)
    except NonFiniteLogits:  # a resumed bench would fail again
        done.forget()
        raise
    files = _answer_files(texts)
    if traces:
        files["trace.jsonl"] = "".join(json.dumps(trace) + "\n" for trace in traces)
    path = results.write(settings.config_json, workdir, rows, files, command=command)
    _show(settings, console, path, rows, traces)
    done.forget()
    _check_lossless(rows)


def _measure(
    settings: Settings,
    cells: list[Cell],
    target: hf.Loaded,
    done: progress.Progress,
    console,
) -> tuple[list[dict], list[dict], list[tuple[str, str]]]:
    """Rows of results.json, traces, and (label, answers) of each method and cell."""
    rows, texts = [], []
    with console.status("compiling") as status:
        cells = [_taught(cell) for cell in cells]
        traced = _traced(settings, cells)
        compiled = measuring.warm(
            [cell.job for cell in cells],
            cells[0].methods,
            [
                functools.partial(token_traces.compile, t.cell.job, t.method)
                for t in _shapes(traced)
            ],
        )
        for number, cell in enumerate(cells):
            report = functools.partial(_show_status, status, cell.name)
            measured = measuring.measure(cell.job, cell.methods, report, done, f"setting {number}")
            report("losslessness and overlap")
            rows += summaries.measured_rows(cell.job, cell.methods, measured, compiled)
            texts += _answers(cell, measured, target)
        status.update("tracing")
        traces = [
            token_traces.record(
                t.cell.job,
                t.method,
                t.number,
                category=t.cell.prompts.prompts[t.number].category,
            )
            for t in traced
        ]
    return rows, traces, texts


def _show_status(status, cell: str, message: str) -> None:
    status.update(Text(f"{cell}: {message}"))


def _check_lossless(rows: Sequence[dict]) -> None:
    for row in rows:
        claims = row["class"] == "L1" or (row["class"] == "L2" and row["temperature"] == 0)
        if claims and (row["lossless"] or {}).get("passed") is False:
            detail = row["lossless"]["detail"]
            raise NotLossless(f"{row['method']} is not lossless: {detail}; see results.json")


def _cells(settings: Settings, target: hf.Loaded, methods: list[passes.Method]) -> list[Cell]:
    """Every cell of the grid. Raises UserError."""
    options = settings.bench
    if settings.record:
        raise UserError("config.record is for mode generate; leave it out")
    if options.trace_prompts < 0:
        raise UserError(f"config.trace_prompts is {options.trace_prompts}; it must be at least 0")
    answer = functools.partial(_plain_answers, settings, target, max(options.batch_sizes))
    names, cells = settings.prompts.names, []
    for name, context in itertools.product(names, options.contexts):
        chosen = prompts_lib.read(settings.prompts, target, answer, name=name, context=context)
        for temperature, batch_size in itertools.product(options.temperatures, options.batch_sizes):
            job = build.job(settings, target, chosen, temperature, batch_size)
            parts = [f"temperature {temperature:g}", f"batch {batch_size}"]
            parts += [str(chosen.name)] * (len(names) > 1) + [f"{context} tokens"] * bool(context)
            cells.append(Cell(job, chosen, methods, ", ".join(parts), not context))
    return cells


def _plain_answers(
    settings: Settings, target: hf.Loaded, batch_size: int, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """New tokens of plain greedy decoding: what later turns follow, for every method."""
    chosen = PromptSet(None, list(prompts), [])
    job = build.job(settings, target, chosen, 0.0, min(batch_size, len(prompts)))
    return passes.run_pass(job, None).outputs


def _taught(cell: Cell) -> Cell:
    others = [prompt.ids for prompt in cell.prompts.others]
    return cell._replace(methods=[passes.teach(cell.job, m, others) for m in cell.methods])


def _traced(settings: Settings, cells: Sequence[Cell]) -> list[Traced]:
    """What to trace: the first prompts of the first cell of each temperature, with every method.

    Only one continuation if only the terminal shows it.
    """
    options = settings.bench
    first = {cell.job.settings["temperature"]: cell for cell in reversed(cells)}
    result = [
        Traced(cell, method, number)
        for cell in list(first.values())[::-1]
        for method in cell.methods
        for number in range(min(options.trace_prompts, len(cell.job.prompts)))
    ]
    if options.show_trace and not result:
        cell = next(reversed(first.values()))
        method = next((m for m in cell.methods if m.drafter.nodes), cell.methods[0])
        result = [Traced(cell, method, 0)]
    return result


def _shapes(traced: Sequence[Traced]) -> list[Traced]:
    """The first of each shape: the others run the same program."""
    keyed = {(id(t.method.drafter), t.cell.job.width): t for t in reversed(traced)}
    return list(keyed.values())


def _answers(cell: Cell, measured: measuring.Measured, target: hf.Loaded) -> list[tuple[str, str]]:
    """(label, answers in Spec-Bench's format) of the first pass of every method, plain included."""
    if not cell.uncut or cell.prompts.name in (None, prompts_lib.STDLIB):
        return []
    first = [("autoregressive", measured.plain[0])]
    first += [(m.name, runs[0]) for m, runs in zip(cell.methods, measured.methods, strict=True)]
    model = Path(target.directory).resolve().name
    return [
        (
            f"{label}, {cell.name}",
            answers.text(_conversations(cell, one), f"{model}, {label}, {cell.name}"),
        )
        for label, one in first
    ]


def _conversations(cell: Cell, one: passes.Pass) -> list[answers.Answer]:
    assert cell.job.spell is not None
    turns: dict[str | int, list[answers.Turn]] = {}
    for i, prompt in enumerate(cell.prompts.prompts):
        ids, lengths = one.outputs[i], one.emitted[i]
        text = cell.job.spell(ids).strip()
        turn = answers.Turn(text, len(ids), len(lengths), one.walls[i], lengths)
        turns.setdefault(prompt.question, []).append(turn)
    category = {prompt.question: prompt.category for prompt in cell.prompts.prompts}
    return [answers.Answer(question, category[question], each) for question, each in turns.items()]


def _answer_files(texts: Sequence[tuple[str, str]]) -> dict[str, str]:
    """File name -> text; labels that give the same name are numbered."""
    files: dict[str, str] = {}
    for label, text in texts:
        name = re.sub(r"[^\w.-]+", "_", label)
        tries = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
        files[next(f"answers/{t}.jsonl" for t in tries if f"answers/{t}.jsonl" not in files)] = text
    return files


def _show(settings: Settings, console, path: Path, rows: list[dict], traces: list[dict]) -> None:
    console.print(terminal.table(rows))
    console.print(
        "[dim]tau: tokens per round; alpha: acceptance rate; plain: our autoregressive tokens/s, "
        "same batch; speed-up: tokens/s over plain, median of "
        f"{settings.bench.repeats} interleaved passes; eff: speed-up over predicted[/dim]"
    )
    drafted = (t for t in traces if any(one["draft"] for one in t["rounds"]))
    shown = next(drafted, traces[0] if traces else None)
    if settings.bench.show_trace and shown is not None:
        head = f", temperature {shown['temperature']:g}: "
        console.print(Text.assemble("\n", (shown["method"], "bold"), head), end="")
        console.print(terminal.legend())
        console.print(terminal.trace(shown))
    written = [path]
    if settings.bench.report:
        # Imported here because matplotlib takes a second to import.
        from specjax.report import html, plots

        plots.save(plots.draw(rows), path.parent / "plots")
        report, notices = html.build(path)
        written.append(report)
        for notice in notices:
            console.print(Text(f"notice: {notice}", "dim"))
    for each in written:
        console.print(Text(f"wrote {each}", "dim"))
