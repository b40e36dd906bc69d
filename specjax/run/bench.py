"""Mode bench: methods x temperatures x batch sizes x prompt sets x context lengths.

Writes into the workdir: results.json, config.json, metrics.jsonl, trace.jsonl, answers/ (one file
per method and setting, in Spec-Bench's format), plots/ and report.html. A bench that was killed is
resumed by the same command. Several processes measure together: a time is that of the slowest one,
costs and traces are those of the first, which writes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from specjax import control, drafters, sharding
from specjax.bench import (
    answers,
    measuring,
    passes,
    profile,
    proofs,
    provenance,
    targets,
)
from specjax.bench.measuring import Report
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Job, Method
from specjax.control import Controller
from specjax.data import progress
from specjax.data import prompts as prompts_lib
from specjax.data.prompts import Prompt, PromptSet
from specjax.errors import NonFiniteLogits, UserError
from specjax.files import write_json
from specjax.generation import auto
from specjax.models import hf
from specjax.models.hf import origin
from specjax.report import terminal
from specjax.run import build, cells, workdirs
from specjax.run.cells import Bench, Cell, NotLossless
from specjax.run.settings import Settings
from specjax.types import is_lossless

__all__ = ["NotLossless", "bench"]

# The folder of the cost profiles that controllers read: measured before the bench.
PROFILES = "profiles"


def bench(settings: Settings, workdir: Path, command: str | None) -> None:
    """Measures every method against plain decoding; prints a table, writes results and report.

    Raises:
        UserError: settings that do not fit.
        NotLossless: after everything is written.
    """
    console, parts = terminal.console(), cells.Parts()
    with terminal.Status(console, "reading the models"), parts.part("reading"):
        target = build.target(settings)
        build.check_targets(settings, target)
        notes: list[str] = []
        methods = build.methods(settings, target, note=notes.append)
    for note in notes:
        console.print(Text(note, "dim"))
    proven = [proofs.read(path) for path in settings.proof]
    with terminal.Status(console, "reading prompts") as status, parts.part("reading"):
        grid = _cells(settings, target, methods, status.update)
    workdirs.announce_replacement(settings, workdir)
    for chosen in {id(cell.prompts): cell.prompts for cell in grid}.values():
        console.print(Text(chosen.about(), "dim"))
    largest = max((cell.job for cell in grid), key=_size)
    console.print(Text(build.about(largest, methods), "dim"))
    ids = [p.ids for cell in grid for p in (*cell.prompts.prompts, *cell.prompts.others)]
    build.check_same_prompts(ids)
    mark, inputs = progress.fingerprint(settings.measured, ids), progress.inputs(settings.measured)
    # The first process writes, and the others go on from where it does.
    done = progress.Progress(workdir if sharding.is_first() else None, mark)
    done.take(sharding.of_first(done.batches))
    if len(done):
        console.print(f"[dim]resuming after {len(done)} batches that were measured before[/dim]")
    shared = cells.Bench(settings, console, done, proven, parts)
    cells.note_proofs(shared, methods)
    with terminal.Status(console, "measuring costs") as status, parts.part("profiles"):
        grid = with_profiles(shared, target, grid, workdir, status.update)
    try:
        measured = cells.measure(grid, shared)
        further = functools.partial(_on_another, shared, measured)
        others = [*map(further, settings.grid.targets)] or None
    except NonFiniteLogits:  # a resumed bench would fail again
        done.forget()
        raise
    facts = provenance.target(target.params, name="", directory=target.directory)
    sharding.check_same("the target", {"hash": facts["weights_sha256"]})
    if not sharding.is_first():
        cells.check_lossless(measured.rows)
        return
    about = {"command": command, "target": facts, "inputs_sha256": inputs}
    texts = [text for cell, one in measured.passes for text in _answers(cell, one, target)]
    cells.write(shared, workdir, measured, _answer_files(texts), others, **about)
    done.forget()
    for name, head in drafters.released(origin(target.directory).name.split("/")[-1]).items():
        console.print(Text(f"a trained drafter exists for this target: {name}, {head}"))
    cells.check_lossless(measured.rows)
    if settings.keep:
        _keep(shared, target, measured, workdir)


def _on_another(shared: cells.Bench, first: cells.Results, label: str) -> dict[str, Any]:
    """Measures with the further target ``label``; what results.json has of it under "targets".

    ``first`` are the results with ``config.target``, which get its rows and traces. Prompts and
    settings are the same.
    """
    own, console, parts = shared.settings.on(label), shared.console, shared.parts
    with terminal.Status(console, f"reading {label}"), parts.part("reading"):
        other = build.target(own)
        methods = [m._replace(name=f"{label}: {m.name}") for m in build.methods(own, other)]
    grid = []
    for cell, _ in first.passes:
        how = cell.job.settings["temperature"], cell.job.batch_size, cell.job.max_new_tokens
        job = build.job(own, other, cell.prompts, *how)
        grid.append(cell._replace(job=job, methods=methods, name=f"{label}, {cell.name}"))
    measured = cells.measure(grid, shared._replace(settings=own), label)
    compared = []
    with terminal.Status(console, f"comparing {label}") as status, parts.part("comparing"):
        for (cell, one), (mine, two) in zip(first.passes, measured.passes, strict=True):
            status.update(cell.name)
            names = [method.name for method in cell.methods]
            ratios = dict(zip(names, map(targets.tau_ratio, one.methods, two.methods), strict=True))
            facts = targets.between(cell.job, mine.job, (one.plain[0], two.plain[0]))
            compared.append({"setting": cell.name} | facts | {"methods": ratios})
    first.rows.extend(measured.rows)
    first.traces.extend(measured.traces)
    facts = provenance.target(other.params, name="", directory=other.directory)
    return {"label": label} | facts | {"compared": compared}


def _size(job: passes.Job) -> tuple[int, int]:
    """The rows, and the tokens of the longest text."""
    return job.batch_size, job.width + job.max_new_tokens


def _keep(shared: cells.Bench, target: hf.Loaded, measured: cells.Results, workdir: Path) -> None:
    """Keeps the fastest methods, and says which; the results are there if that fails."""
    try:
        texts = [each.text for each in _kept(shared.settings, target, measured, workdir)]
    except UserError as error:
        texts = [f"nothing: {error}"]
    for text in texts or ["nothing: all are lossy, warm or nested, or have keys of a rule"]:
        shared.console.print(Text(f"kept for drafter.name=auto: {text}"))


def _kept(
    settings: Settings, target: hf.Loaded, measured: cells.Results, workdir: Path
) -> list[auto.Choice]:
    """Keeps the fastest method of each number of rows and kind of sampling.

    Several sets of prompts and temperatures count by the geometric mean of their speed-ups. Lossy
    methods, warm ones, rules with keys, and drafters with drafters in them are not kept.
    """
    speeds: dict[tuple[int, bool], dict[str, list[float]]] = {}
    for row in measured.rows:
        sampled, choice = row["temperature"] > 0, settings.methods.get(row["method"])
        if choice is None or choice.warm or choice.rule_keys or choice.drafter.get("drafters"):
            continue
        if row["category"] is None and is_lossless(row["class"], sampled):
            own = speeds.setdefault((row["batch_size"], sampled), {})
            own.setdefault(row["method"], []).append(row["speedup"])
    result = []
    for (rows, sampled), by_method in speeds.items():
        tried = []
        for label, each in by_method.items():
            choice = settings.methods[label]
            keys = dict(choice.drafter)
            if control.wants_profile(text := str(keys.get("control") or "")):
                keys["control"] = control.with_profile(text, _profile(workdir, label).resolve())
            tried.append(auto.Tried(label, keys, choice.rule, statistics.geometric_mean(each)))
        dtype = build.computes(settings.dtype, settings.weights)
        result.append(auto.keep(target.directory, rows, sampled, tried, dtype=dtype))
    return result


def _cells(
    settings: Settings, target: hf.Loaded, methods: list[passes.Method], report: Report
) -> list[Cell]:
    """Every cell of the grid. Raises UserError."""
    source, grid = settings.source, []
    answer = functools.partial(_plain_answers, settings, target, report)
    for name, context in itertools.product(source.names, settings.grid.contexts or (0,)):
        chosen = prompts_lib.read(source, target, answer, name=name, context=context)
        more = [str(chosen.name)] * (len(source.names) > 1) + [f"{context} tokens"] * bool(context)
        grid += cells.grid(settings, target, methods, chosen, more, not context)
    return grid


def _plain_answers(
    settings: Settings, target: hf.Loaded, report: Report, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """New tokens of plain greedy decoding: what later turns follow, for every method."""
    report(f"plain decoding of {len(prompts)} turns of conversations, which other turns follow")
    chosen = PromptSet(None, list(prompts), [])
    largest = dataclasses.replace(settings, batch_size=max(settings.batch_sizes))
    job = build.job(settings, target, chosen, 0.0, build.rows(largest, len(prompts)))
    return passes.run_pass(job, None).outputs


def _answers(cell: Cell, measured: measuring.Measured, target: hf.Loaded) -> list[tuple[str, str]]:
    """(label, answers in Spec-Bench's format) of the first pass of every method, plain included."""
    if not cell.uncut or cell.prompts.name in (None, prompts_lib.STDLIB):
        return []
    first = [("autoregressive", measured.plain[0])]
    first += [(m.name, runs[0]) for m, runs in zip(cell.methods, measured.methods, strict=True)]
    model = origin(target.directory).name
    named = [(f"{label}, {cell.name}", _conversations(cell, one)) for label, one in first]
    return [(name, answers.text(each, f"{model}, {name}")) for name, each in named]


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


def with_profiles(
    shared: Bench, target: hf.Loaded, cells: Sequence[Cell], workdir: Path, report: Report
) -> list[Cell]:
    """The cells, with a measured profile for each method whose controller wants one.

    The profile of a method covers the batch sizes and temperatures of the cells. Costs are measured
    on the prompts that warm drafters learn from (config.warm_prompts), or else on the first ones
    of the bench; acceptance only on the former, so that no measured text is known before.
    """
    settings, done = shared.settings, shared.done
    methods, found = list(cells[0].methods), {}
    # A length of config.grid.gammas that a method does not have was left out.
    places = {method.name: index for index, method in enumerate(methods)}
    for label, choice in settings.methods.items():
        text = choice.drafter.get("control")
        if label not in places or not control.wants_profile(text):
            continue
        sharding.check_shared(workdir)  # the first process writes the profiles
        key, path = _without_control(choice), _profile(workdir, label)
        text = control.with_profile(str(text), path)
        if key not in found:
            name = f"profile of {label}"
            measured = done.get(name) or _measured(settings, target, cells, label, report)
            found[key] = sharding.of_first(measured)
            done.put(name, found[key])
        if sharding.is_first():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, found[key])
        sharding.of_first(None)  # written before the others read it
        methods[places[label]] = _method(settings, target, label, text)
    return [cell._replace(methods=methods) for cell in cells]


def _profile(workdir: Path, label: str) -> Path:
    """The profile of a method. A comma would end the value of the controller's key."""
    return workdir / PROFILES / f"{re.sub(', ?', '_', label)}.json"


def _without_control(choice: MethodChoice) -> str:
    """What a profile depends on: the drafter, and whether the controller chooses tree sizes."""
    keys = {key: str(value) for key, value in choice.drafter.items() if key != "control"}
    nodes = profile.by_nodes(choice.drafter.get("control"))
    return json.dumps([keys, nodes, str(choice._replace(drafter={}))], sort_keys=True)


def _measured(
    settings: Settings, target: hf.Loaded, cells: Sequence[Cell], label: str, report: Report
) -> dict[str, Any]:
    """The profile of all methods that differ from this one in their controller only."""
    choice = settings.methods[label]
    own = [
        str(each.drafter["control"])
        for each in settings.methods.values()
        if each.drafter.get("control") and _without_control(each) == _without_control(choice)
    ]
    make = functools.partial(_method, settings, target, label)
    jobs, others = _jobs(cells)
    # Without other prompts the temperatures would be fitted to the measured ones.
    fitted = others and any(control.read(text)[0] == "calibrated" for text in own)
    nodes = profile.by_nodes(choice.drafter["control"])
    say = lambda message: report(f"{label}: {message}")  # noqa: E731
    names = Path(target.directory).name, str(choice.drafter["name"])
    # A text that names a file is no reason to fit.
    policies = any(map(control.wants_policies, own))
    how = {"acceptance": others, "confidences": fitted, "nodes": nodes, "policies": policies}
    return profile.measure(jobs, make, say, names=names, **how).to_json()


def _method(settings: Settings, target: hf.Loaded, label: str, text: str | Controller) -> Method:
    """The method with another controller."""
    choice = settings.methods[label]
    own = choice._replace(drafter=choice.drafter | {"control": text})
    return build.methods(settings, target, {label: own})[0]


def _jobs(cells: Sequence[Cell]) -> tuple[list[Job], bool]:
    """One job for each batch size and kind of sampling, and whether no measured prompt is in them.

    Prompts are repeated to fill a batch.
    """
    jobs: dict[tuple[int, bool], Job] = {}
    others = [prompt.ids for prompt in cells[0].prompts.others]
    for cell in cells:
        key = cell.job.batch_size, not cell.job.settings["temperature"]
        chosen = others or list(cell.job.prompts)
        filled = (chosen * -(-key[0] // len(chosen)))[: max(key[0], len(others))]
        jobs.setdefault(key, cell.job._replace(prompts=filled, eos_id=()))
    return list(jobs.values()), bool(others)
