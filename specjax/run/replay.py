"""Mode replay: block efficiency of each method on recorded conversations, without a model."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.text import Text

from specjax.bench import passes, proofs, results
from specjax.bench import replay as replay_lib
from specjax.data.recordings import Trace
from specjax.report import terminal
from specjax.run import workdirs
from specjax.run.resolve import Settings

LEGEND = "tau: tokens per round; alpha: acceptance rate"


def replay(settings: Settings, workdir: Path, command: str | None) -> None:
    """Replays the recording with each method; prints and writes a row per category.

    After an interrupt, the rows of the methods that are done.
    """
    console, began = terminal.console(), time.perf_counter()
    options = settings.replay
    target, recording = replay_lib.load(
        options.recording,
        target=settings.target,
        vocab_size=options.vocab_size,
        max_new_tokens=settings.max_new_tokens,
        skip_bad=options.skip_bad,
        num_traces=options.num_traces,
        temperatures=(settings.sampling["temperature"], *settings.bench.temperatures),
    )
    guessed = not (options.vocab_size or settings.target)
    methods = [
        replay_lib.method(target, choice, settings.seed, label, guessed)
        for label, choice in settings.methods.items()
    ]
    workdirs.announce_replacement(settings, workdir)
    batch_size = min(settings.batch_size, len(recording.traces))
    rows: list[dict] = []
    interrupt = None
    try:
        with terminal.Status(console, "compiling") as status:
            for method in methods:
                report = functools.partial(_show_status, status, method.name)
                rows += _rows(settings, target, recording.traces, method, batch_size, report)
    except KeyboardInterrupt as error:
        if not rows:
            raise
        interrupt = error
    console.print(replay_lib.table(rows))
    seconds = f"{time.perf_counter() - began:.1f} seconds, compilation included"
    console.print(f"[dim]{LEGEND}; vocabulary {recording.vocab_size}; {seconds}[/dim]")
    _show_skipped(console, recording.skipped)
    path = results.write(
        settings.config_json,
        workdir,
        rows,
        command=command,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        skipped=recording.skipped,
        unfinished=interrupt is not None,
    )
    console.print(Text(f"wrote {path}", "dim"))
    if interrupt is not None:
        raise interrupt


def _rows(
    settings: Settings,
    target,
    traces: Sequence[Trace],
    method: passes.Method,
    batch_size: int,
    report: Callable[[str], None],
) -> list[dict]:
    """The rows of one method: of all conversations, and of each category."""
    tallies = replay_lib.measure(
        method,
        traces,
        batch_size=batch_size,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        report=report,
    )
    return [
        results.new_row(
            method.name,
            method.accept,
            tally.counts,
            temperature=0.0,
            batch_size=batch_size,
            prompts=tally.prompts,
            category=category,
            status=proofs.status(method.drafter, method.accept, target),
            outputs=_outputs(traces, category, settings.max_new_tokens),
        )
        for category, tally in tallies.items()
    ]


def _outputs(traces: Sequence[Trace], category: str | None, most: int) -> list[list[int]]:
    """The replayed outputs of a category, or of all; ``most`` tokens of each, 0 = no limit."""
    own = [trace for trace in traces if category in (None, trace.category)]
    return [trace.output[: most or None] for trace in own]


def _show_status(status, method: str, message: str) -> None:
    status.update(f"{method}: {message}")


def _show_skipped(console, lines: list[dict]) -> None:
    if not lines:
        return
    some = "; ".join(f"line {bad['line']}: {bad['why']}" for bad in lines[:3])
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    console.print(Text(f"left out {len(lines)} bad lines: {some}{more}"))
