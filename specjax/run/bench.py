"""Mode bench: methods x temperatures x batch sizes x prompt sets x context lengths.

Writes into the workdir: results.json, config.json, metrics.jsonl, trace.jsonl, answers/ (one file
per method and setting, in Spec-Bench's format), plots/ and report.html. A bench that was killed is
resumed by the same command.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.text import Text

from specjax.bench import (
    answers,
    measuring,
    passes,
    proofs,
    provenance,
)
from specjax.data import progress
from specjax.data import prompts as prompts_lib
from specjax.data.prompts import Prompt, PromptSet
from specjax.errors import NonFiniteLogits
from specjax.models import hf
from specjax.models.hf import origin
from specjax.report import terminal
from specjax.run import build, cells, profiles, workdirs
from specjax.run.cells import Cell, NotLossless
from specjax.run.settings import Settings

__all__ = ["NotLossless", "bench"]


def bench(settings: Settings, workdir: Path, command: str | None) -> None:
    """Measures every method against plain decoding; prints a table, writes results and report.

    Raises:
        UserError: settings that do not fit.
        NotLossless: after everything is written.
    """
    console = terminal.console()
    with terminal.Status(console, "reading the models"):
        target = build.target(settings)
        notes: list[str] = []
        methods = build.methods(settings, target, note=notes.append)
    for note in notes:
        console.print(Text(note, "dim"))
    proven = [proofs.read(path) for path in settings.proof]
    with terminal.Status(console, "reading prompts") as status:
        grid = _cells(settings, target, methods, status.update)
    workdirs.announce_replacement(settings, workdir)
    for chosen in {id(cell.prompts): cell.prompts for cell in grid}.values():
        console.print(Text(chosen.about(), "dim"))
    ids = [p.ids for cell in grid for p in (*cell.prompts.prompts, *cell.prompts.others)]
    mark = progress.fingerprint(settings.measured, ids)
    done = progress.Progress(workdir, mark)
    if len(done):
        console.print(f"[dim]resuming after {len(done)} passes that were measured before[/dim]")
    cells.note_proofs(console, proven, methods)
    with terminal.Status(console, "measuring costs") as status:
        grid = profiles.with_profiles(settings, target, grid, workdir, done, status.update)
    try:
        measured = cells.measure(grid, settings, done, console, proven)
    except NonFiniteLogits:  # a resumed bench would fail again
        done.forget()
        raise
    texts = [text for cell, one in measured.passes for text in _answers(cell, one, target)]
    facts = provenance.target(target.params, name="", directory=target.directory)
    cells.write(settings, workdir, measured, facts, console, _answer_files(texts), command)
    done.forget()
    cells.check_lossless(measured.rows)


def _cells(
    settings: Settings,
    target: hf.Loaded,
    methods: list[passes.Method],
    report: Callable[[str], None],
) -> list[Cell]:
    """Every cell of the grid. Raises UserError."""
    source, grid = settings.source, []
    answer = functools.partial(_plain_answers, settings, target, max(settings.batch_sizes), report)
    for name, context in itertools.product(source.names, settings.grid.contexts or (0,)):
        chosen = prompts_lib.read(source, target, answer, name=name, context=context)
        more = [str(chosen.name)] * (len(source.names) > 1) + [f"{context} tokens"] * bool(context)
        grid += cells.grid(settings, target, methods, chosen, more, not context)
    return grid


def _plain_answers(
    settings: Settings,
    target: hf.Loaded,
    batch_size: int,
    report: Callable[[str], None],
    prompts: Sequence[Prompt],
) -> list[list[int]]:
    """New tokens of plain greedy decoding: what later turns follow, for every method."""
    report(f"plain decoding of {len(prompts)} turns of conversations, which other turns follow")
    chosen = PromptSet(None, list(prompts), [])
    largest = dataclasses.replace(settings, batch_size=batch_size)
    job = build.job(settings, target, chosen, 0.0, build.rows(largest, len(prompts)))
    return passes.run_pass(job, None).outputs


def _answers(cell: Cell, measured: measuring.Measured, target: hf.Loaded) -> list[tuple[str, str]]:
    """(label, answers in Spec-Bench's format) of the first pass of every method, plain included."""
    if not cell.uncut or cell.prompts.name in (None, prompts_lib.STDLIB):
        return []
    first = [("autoregressive", measured.plain[0])]
    first += [(m.name, runs[0]) for m, runs in zip(cell.methods, measured.methods, strict=True)]
    model = origin(target.directory).name
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
        turn = answers.Turn(cell.job.spell(one.outputs[i]).strip(), one.walls[i], one.emitted[i])
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
