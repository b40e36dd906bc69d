"""Mode bench: methods x temperatures x batch sizes x prompt sets x context lengths, measured, checked, and reported.

What it leaves in the workdir: results.json (and config.json, metrics.jsonl), trace.jsonl, answers/ (one file per method and
setting, in Spec-Bench's format), plots/ and report.html. A bench that was killed goes on with the same command.
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

from specjax.bench import answers, passes, progress, results, summaries, token_traces
from specjax.config import Config
from specjax.data import prompts
from specjax.data.prompts import PromptSet
from specjax.errors import NonFiniteLogits, UserError
from specjax.models import hf
from specjax.report import terminal
from specjax.run import resolve


class NotLossless(Exception):
    """A method that claims to be lossless failed its check."""


class Setting(NamedTuple):
    """A job of the grid, with its prompts and with the methods, which may have learnt from others."""

    job: passes.Job
    chosen: PromptSet
    methods: list[passes.Method]
    name: str
    whole: bool  # whether the prompts are those of the file


def measure(config: Config, workdir: Path, command: str | None) -> None:
    """Measures the methods of ``config.grid`` (or ``config.drafter``) against plain decoding; prints a table, writes results
    and report.

    Raises UserError, and NotLossless when everything is written.
    """
    console = terminal.console()
    target = resolve.load_target(config)
    methods = [
        resolve.method(target, choice, config, label)
        for label, choice in resolve.methods(config).items()
    ]
    with console.status("reading prompts"):
        settings = _settings(config, target, methods)
    ids = [p.ids for s in settings for p in (*s.chosen.prompts, *s.chosen.others)]
    done = progress.Progress(workdir, progress.fingerprint(config, ids))
    if len(done):
        console.print(f"[dim]going on after {len(done)} passes that were measured before[/dim]")
    found, told = [], []
    try:
        with console.status("compiling") as status:
            settings = [_taught(s) for s in settings]
            traced = _traced(config, settings)
            compiled = passes.warm(
                [s.job for s in settings],
                settings[0].methods,
                [functools.partial(token_traces.compile, s.job, m) for s, m, _ in _once(traced)],
            )
            for number, s in enumerate(settings):
                say = lambda what, s=s: status.update(Text(f"{s.name}: {what}"))  # noqa: E731
                measured = passes.measure(s.job, s.methods, say, done, f"setting {number}")
                say("losslessness and overlap")
                found += summaries.rows(s.job, s.methods, measured, compiled)
                told += _answers(s, measured, target)
            status.update("tracing")
            traces = [
                token_traces.record(s.job, m, n, category=s.chosen.prompts[n].category)
                for s, m, n in traced
            ]
    except NonFiniteLogits:  # they will be so again
        done.forget()
        raise
    files = _files(told) | (
        {"trace.jsonl": "".join(json.dumps(t) + "\n" for t in traces)} if traces else {}
    )
    path = results.write(config, workdir, found, files, command=command)
    _show(config, console, path, found, traces)
    done.forget()
    for row in found:
        claims = row["class"] == "L1" or (row["class"] == "L2" and row["temperature"] == 0)
        if claims and (row["lossless"] or {}).get("passed") is False:
            raise NotLossless(
                f"{row['method']} lost something: {row['lossless']['detail']}; see results.json"
            )


def _settings(config: Config, target: hf.Loaded, methods: list[passes.Method]) -> list[Setting]:
    """Every job of the grid. Raises UserError."""
    if config.get("record"):
        raise UserError("config.record is for mode generate; leave it out")
    if config.get("trace_prompts", 1) < 0:
        raise UserError(f"config.trace_prompts is {config.trace_prompts}; it must be at least 0")
    batch_sizes = config.grid.batch_sizes or (config.batch_size,)
    answer = functools.partial(plainly, config, target, max(batch_sizes))
    found = []
    for source, context in itertools.product(
        prompts.names(config), config.grid.get("contexts") or (0,)
    ):
        chosen = prompts.read(config, target, answer, source=source, context=context)
        for temperature, batch_size in itertools.product(resolve.temperatures(config), batch_sizes):
            job = resolve.job(config, target, chosen, temperature, batch_size)
            parts = [f"temperature {temperature:g}", f"batch {batch_size}"]
            parts += [str(chosen.name)] * (len(prompts.names(config)) > 1) + [
                f"{context} tokens"
            ] * bool(context)
            found.append(Setting(job, chosen, methods, ", ".join(parts), not context))
    return found


def plainly(
    config: Config, target: hf.Loaded, batch_size: int, asked: Sequence[prompts.Prompt]
) -> list[list[int]]:
    """New tokens of plain greedy decoding: what the later turns of conversations follow, whatever is measured on them."""
    chosen = PromptSet(None, list(asked), [])
    job = resolve.job(config, target, chosen, 0.0, min(batch_size, len(asked)))
    return passes.run_pass(job, None).outputs


def _taught(s: Setting) -> Setting:
    others = [p.ids for p in s.chosen.others]
    return s._replace(methods=[passes.teach(s.job, method, others) for method in s.methods])


Traced = list[tuple[Setting, passes.Method, int]]


def _traced(config: Config, settings: Sequence[Setting]) -> Traced:
    """What is traced: the first ``config.trace_prompts`` prompts of the first setting of every temperature, with every method;
    only one continuation, if only the terminal is to show it."""
    first = list({s.job.settings["temperature"]: s for s in reversed(settings)}.values())[::-1]
    counts = [min(config.get("trace_prompts", 1), len(s.job.prompts)) for s in first]
    found = [
        (s, m, n)
        for s, count in zip(first, counts, strict=True)
        for m in s.methods
        for n in range(count)
    ]
    if config.show_trace and not found:
        found = [
            (
                first[0],
                next((m for m in first[0].methods if m.drafter.nodes), first[0].methods[0]),
                0,
            )
        ]
    return found


def _once(traced: Traced) -> Traced:
    """The first of each shape: the others run the same program."""
    return list({(id(m.drafter), s.job.width): (s, m, n) for s, m, n in reversed(traced)}.values())


def _answers(s: Setting, measured: passes.Measured, target: hf.Loaded) -> list[tuple[str, str]]:
    """(label, answers in Spec-Bench's format) of the first pass of plain decoding and of every method."""
    if not s.whole or s.chosen.name in (None, prompts.STDLIB):
        return []
    first = [("autoregressive", measured.plain[0])]
    first += [(m.name, runs[0]) for m, runs in zip(s.methods, measured.methods, strict=True)]
    model = Path(target.directory).resolve().name
    return [
        (f"{label}, {s.name}", answers.text(_said(s, one), f"{model}, {label}, {s.name}"))
        for label, one in first
    ]


def _files(told: Sequence[tuple[str, str]]) -> dict[str, str]:
    """File name -> text; labels that spell one name are numbered."""
    found: dict[str, str] = {}
    for label, text in told:
        name = re.sub(r"[^\w.-]+", "_", label)
        tries = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
        found[next(f"answers/{t}.jsonl" for t in tries if f"answers/{t}.jsonl" not in found)] = text
    return found


def _said(s: Setting, one: passes.Pass) -> list[answers.Answer]:
    assert s.job.spell is not None
    turns: dict[str | int, list[answers.Turn]] = {}
    for i, prompt in enumerate(s.chosen.prompts):
        ids, lengths = one.outputs[i], one.emitted[i]
        turn = answers.Turn(s.job.spell(ids).strip(), len(ids), len(lengths), one.walls[i], lengths)
        turns.setdefault(prompt.question, []).append(turn)
    category = {prompt.question: prompt.category for prompt in s.chosen.prompts}
    return [answers.Answer(question, category[question], each) for question, each in turns.items()]


def _show(config: Config, console, path: Path, found: list[dict], traces: list[dict]) -> None:
    console.print(terminal.table(found))
    console.print(
        "[dim]tau: tokens per round; alpha: acceptance rate; plain: our autoregressive tokens/s, same batch; speed-up: "
        f"tokens/s over plain, median of {config.repeats} interleaved passes; eff: speed-up over predicted[/dim]"
    )
    shown = next(
        (t for t in traces if any(one["draft"] for one in t["rounds"])),
        traces[0] if traces else None,
    )
    if config.show_trace and shown is not None:
        console.print(
            Text.assemble(
                "\n", (shown["method"], "bold"), f", temperature {shown['temperature']:g}: "
            ),
            end="",
        )
        console.print(terminal.legend())
        console.print(terminal.trace(shown))
    wrote = [path]
    if config.get("report", True):
        from specjax.report import html, plots  # only here: matplotlib takes a second to import

        plots.save(plots.draw(found), path.parent / "plots")
        report, notices = html.build(path)
        wrote.append(report)
        for notice in notices:
            console.print(Text(f"notice: {notice}", "dim"))
    for each in wrote:
        console.print(Text(f"wrote {each}", "dim"))
