"""Mode replay: block efficiency of each method on recorded conversations, without a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from specjax.bench import passes, results
from specjax.bench import replay as replay_lib
from specjax.bench.measuring import Report
from specjax.bench.metrics import Counts
from specjax.data import recordings
from specjax.data.recordings import Recording, Trace
from specjax.errors import UserError
from specjax.report import terminal
from specjax.run import process, workdirs
from specjax.run.settings import Settings
from specjax.types import LM

LEGEND = "tau: tokens per round; alpha: acceptance rate"


def replay(settings: Settings, workdir: Path, command: str | None) -> None:
    """Replays the recording with each method; prints and writes a row per category.

    After an interrupt, the rows of the methods that are done.
    """
    console, began = terminal.console(), time.perf_counter()
    target, recording = _load(settings)
    guessed = not (settings.vocab_size or settings.target)
    methods = [
        replay_lib.method(target, choice, settings.seed, label, guessed)
        for label, choice in settings.methods.items()
    ]
    workdirs.announce_replacement(settings, workdir)
    rows: list[dict] = []
    with process.held(rows) as interrupts, terminal.Status(console, "compiling") as status:
        for method in methods:
            report = status.part(method.name)
            rows += _rows(settings, target, recording.traces, method, report)
        for method in {method.drafter.longest: method for method in methods}.values():
            rows += _recorded(settings, target, recording.traces, method)
    console.print(replay_lib.table(rows))
    seconds = f"{time.perf_counter() - began:.1f} seconds, compilation included"
    console.print(f"[dim]{LEGEND}; vocabulary {recording.vocab_size}; {seconds}[/dim]")
    _show_skipped(console, recording.skipped)
    curves = results.curves(rows)
    for note in terminal.curves(curves):
        console.print(Text(note, "dim"))
    more = {"skipped": recording.skipped, "unfinished": bool(interrupts), "curves": curves}
    path = workdirs.write(settings, workdir, rows, command=command, **more)
    console.print(Text(f"wrote {path}", "dim"))
    if interrupts:
        raise interrupts[0]


def _load(settings: Settings) -> tuple[LM, Recording]:
    """The recording, and the target that drafters are made for. No weights are read.

    Raises UserError: settings that a recording cannot have, a target without a vocabulary, and as
    ``recordings.read``.
    """
    if settings.sampling.temperature or any(settings.grid.temperatures):
        raise UserError(
            "a recording is one text: it is replayed at temperature 0 only; "
            "set config.sampling.temperature=0"
        )
    if not settings.traces:
        raise UserError(
            "config.traces is empty; give a .jsonl file whose lines have prompt_ids and output_ids"
        )
    size, tokens = settings.vocab_size, None
    if settings.target:
        size, tokens = replay_lib.vocabulary_of(settings.target)
        if settings.vocab_size not in (0, size):
            raise UserError(
                f"config.vocab_size is {settings.vocab_size} and {settings.target} has {size} "
                "tokens; leave one of them out"
            )
    options = {"skip_bad": settings.skip_bad, "most": settings.num_traces}
    recording = recordings.read(settings.traces, size, **options)
    return replay_lib.recorded(recording.vocab_size, tokens and tokens.name, tokens), recording


def _rows(
    settings: Settings, target: LM, traces: Sequence[Trace], method: passes.Method, report: Report
) -> list[dict]:
    """The rows of one method: of all conversations, and of each category, sorted by name."""
    batch_size, most = min(settings.batch_size, len(traces)), settings.max_new_tokens
    measured = replay_lib.measure_rounds(
        method,
        traces,
        batch_size=batch_size,
        max_new_tokens=most,
        seed=settings.seed,
        report=report,
    )
    texts = [_decoded(*each, most) for each in zip(traces, measured, strict=True)]
    texts.sort(key=lambda text: text.category or "")
    return results.rows_of_texts(method, target, texts, 0.0, batch_size)


def _decoded(trace: Trace, rounds: tuple[Counts, list[int]], most: int) -> results.Decoded:
    """A text with its counts, and the tokens of its rounds; ``most`` is max_new_tokens."""
    counts, emitted = rounds
    output = trace.output[: most or None]
    return results.Decoded(trace.category, counts, output, emitted, len(trace.prompt))


def _recorded(
    settings: Settings, target: LM, traces: Sequence[Trace], method: passes.Method
) -> list[dict]:
    """The rows of methods that were recorded with the texts, with the draft length of ``method``.

    Texts without rounds of a method are not in its rows.
    """
    gamma, most, rows = method.drafter.longest, settings.max_new_tokens, []
    for name in dict.fromkeys(name for trace in traces for name in trace.rounds if gamma):
        texts = [
            _decoded(trace, replay_lib.recorded_rounds(trace, name, gamma, most), most)
            for trace in traces
            if trace.rounds.get(name)
        ]
        if texts:
            one = method._replace(name=f"{name} (recorded), gamma {gamma}")
            found = results.rows_of_texts(one, target, texts, 0.0, settings.batch_size)
            rows += [row | {"accept": "-", "class_status": None} for row in found]
    return rows


def _show_skipped(console, lines: list[dict]) -> None:
    if not lines:
        return
    some = "; ".join(f"line {bad['line']}: {bad['why']}" for bad in lines[:3])
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    console.print(Text(f"left out {len(lines)} bad lines: {some}{more}"))
