"""Mode online: decodes a stream of requests with a drafter that learns from their corrections.

Writes into the workdir: online.jsonl (a line per request), results.json with alpha and tau of each
window of requests, config.json, metrics.jsonl, plots/, report.html, checkpoints/, and model/, the
drafter as it is at the end. A stream that was killed is resumed by the same command.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from specjax import files, registry
from specjax.bench import metrics, passes, provenance, results
from specjax.config import given
from specjax.data import prompts as prompts_lib
from specjax.data.prompts import PromptSet
from specjax.drafters import objectives
from specjax.errors import UserError
from specjax.models import hf
from specjax.report import terminal
from specjax.run import build, cells, workdirs
from specjax.run.settings import Settings
from specjax.train.settings import OnlineKeys

LEGEND = "alpha: acceptance rate; tau: tokens per round; updates: before the window"


def online(settings: Settings, workdir: Path, command: str | None) -> None:
    """Decodes the stream, updates the drafter, and writes what was measured. Raises UserError."""
    # Imported here because Orbax takes seconds to import.
    from specjax.train import stream

    console = terminal.console()
    own = _is_online(workdir)
    if not own:
        # A run of another mode, which this would overwrite.
        results.check_no_training(workdir)
    target = build.target(settings)
    if target.lm.encoder is not None:
        raise UserError(
            f"{target.directory} is an encoder-decoder model, and mode online trains drafters of "
            "decoders only; take a decoder, or mode generate"
        )
    chosen = _requests(settings, target)
    job, method, learner = _prepared(settings, target, chosen)
    workdirs.announce_replacement(settings, workdir)
    console.print(Text(chosen.about(), "dim"))
    facts = provenance.target(target.params, name="", directory=target.directory)
    workdir.mkdir(parents=True, exist_ok=True)
    # Until the results are written, it says whose checkpoints these are.
    if not own:
        files.write_text(workdir / "config.json", settings.config_json)
    what = {"requests": build.digest(job.prompts), "target": facts["weights_sha256"]}
    lasting, every = _lasting(settings) | what, settings.online.checkpoint_every
    state, lines = stream.follow(job, method, learner, workdir, lasting, every)
    rows, about = summarise(job, method, lines, settings.online.window)
    path = workdirs.write(settings, workdir, rows, command=command, target=facts, online=about)
    _show(console, rows[0]["windows"], about)
    saved = _save(settings, target, method, learner.params(state.train), workdir)
    console.print(Text(f"wrote {saved}", "dim"))
    cells.write_report(console, path, rows, draw=settings.report)


def _prepared(
    settings: Settings, target: hf.Loaded, chosen: PromptSet
) -> tuple[passes.Job, passes.Method, Any]:
    """The job, the method, and the compiled update (``train.online.Learner``)."""
    from specjax.train import online as online_lib
    from specjax.train import optimise
    from specjax.train.recipes import common

    options = settings.online
    temperature = float(settings.sampling.temperature)
    [method] = build.methods(settings, target)
    [choice] = settings.methods.values()
    common.check_savable(choice.drafter["name"], method.drafter, method.params.draft)
    job = build.job(settings, target, chosen, temperature, settings.batch_size)
    keys, longest = given(settings.loss), job.width + job.max_new_tokens
    loss = online_lib.loss_of(
        job.target, method.drafter, longest, temperature=temperature or 1.0, keys=keys
    )
    steps = max(1, len(job.prompts) // options.every)
    optimiser = optimise.optimiser(steps, **dataclasses.asdict(settings.optimiser))
    return job, method, online_lib.learner(job, method, loss, optimiser, options)


def _is_online(workdir: Path) -> bool:
    """Whether the directory holds a run of this mode."""
    config = workdir / "config.json"
    return config.is_file() and files.read_json(config).get("mode") == "online"


def _requests(settings: Settings, target: hf.Loaded) -> PromptSet:
    """The stream, in the order of the file. Of a conversation only the first turn is a request."""
    source = dataclasses.replace(settings.source, first_turns=True)
    return prompts_lib.read(source, target, lambda _: [], name=source.names[0])


def _lasting(settings: Settings) -> dict[str, Any]:
    """The configuration, as plain JSON, that a resumed stream must have."""
    config = {key: value for key, value in settings.measured.items() if key != "report"}
    kept = {key: value for key, value in config["online"].items() if key not in OnlineKeys.FREE}
    return config | {"online": kept}


def summarise(
    job: passes.Job, method: passes.Method, lines: Sequence[dict], window: int
) -> tuple[list[dict], dict[str, Any]]:
    """The rows of results.json, and its key "online".

    The first row is of the whole stream and has "windows"; one row per category follows.
    """
    texts = [results.Decoded(line["category"], _counts(line), line["output"]) for line in lines]
    temperature = job.settings["temperature"]
    rows = results.rows_of_texts(method, job.target, texts, temperature, job.batch_size)
    starts = range(0, len(lines), window)
    rows[0]["windows"] = [_window(lines[start : start + window]) for start in starts]
    updates = [line["update"]["seconds"] for line in lines if line["update"]]
    about = {
        "window": window,
        "updates": len(updates),
        "wrong": sum(line["wrong"] for line in lines),
        "seconds_per_update": float(np.median(updates)) if updates else None,
        "seconds_per_request": float(np.median([line["seconds"] for line in lines])),
        "seconds": sum(line["seconds"] for line in lines),
        "seconds_of_updates": sum(updates),
    }
    return rows, about


def _counts(line: dict) -> metrics.Counts:
    """The counts of a line of a journal."""
    tested, passed = (np.asarray(depths, int) for depths in line["by_depth"])
    seen = line["tokens"], line["rounds"], line["accepted"]
    return metrics.Counts(*seen, tested, passed, line["verified"])


def _window(lines: Sequence[dict]) -> dict[str, Any]:
    """Some requests that follow each other: what was counted, and the updates before them."""
    counts = metrics.total([_counts(line) for line in lines])
    summary = metrics.summary(counts)
    categories = Counter(line["category"] for line in lines if line["category"] is not None)
    return {
        "first": lines[0]["request"],
        "last": lines[-1]["request"],
        "updates": lines[0]["updates"],
        "categories": dict(categories),
        "tokens": counts.tokens,
        "alpha": summary["acceptance_rate"],
        "tau": summary["block_efficiency"],
        "wrong": sum(line["wrong"] for line in lines),
        "seconds": sum(line["seconds"] for line in lines),
    }


def _show(console, windows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("requests", "updates", "alpha", "tau", "topics"):
        table.add_column(head, justify="left" if head == "topics" else "right")
    for one in windows:
        topics = Text(", ".join(f"{name} {count}" for name, count in one["categories"].items()))
        alpha = "" if one["alpha"] is None else f"{one['alpha']:.3f}"
        requests, updates = f"{one['first']} to {one['last']}", str(one["updates"])
        table.add_row(requests, updates, alpha, f"{one['tau']:.2f}", topics)
    console.print(table)
    console.print(Text(LEGEND, "dim"))
    cost = f"{1e3 * about['seconds_per_request']:.0f} ms per request"
    if about["seconds_per_update"] is not None:
        cost += f", {1e3 * about['seconds_per_update']:.0f} ms per update (medians), "
        share = about["seconds_of_updates"] / (about["seconds_of_updates"] + about["seconds"])
        cost += f"{about['updates']} updates: {share:.0%} of the time"
    console.print(Text(cost, "dim"))


def _save(
    settings: Settings, target: hf.Loaded, method: passes.Method, params: Any, workdir: Path
) -> Path:
    """Writes the drafter to ``workdir/model``. Raises UserError."""
    from specjax.train.recipes import common

    [choice], path = settings.methods.values(), workdir / "model"
    training, keys = method.drafter.training, choice.drafter
    name = keys["name"]
    assert training is not None
    how = None if registry.is_import(name) else objectives.distilled(name)
    if training.model is None and how is None:
        base = Path(settings.target).name
        common.write_heads(path, target, method.drafter, params, base, {})
    else:
        kind = how.network() if how is not None and how.network is not None else hf
        more: Any = {"more": how.facts(keys)} if how is not None and how.facts is not None else {}
        draft = kind.load(keys["model"])
        kind.save(path, draft.config, params, draft.tokenizer or target.text_tokenizer, **more)
    return path
