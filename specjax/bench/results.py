"""The rows of results.json, and the files of a workdir: written at the end, all at once.

Keys of results.json beside ``rows``: ``head()``, "command", and what ``write`` is given:

target
    ``provenance.target``: name, dtype, number of parameters, source, hash of the weights.
max_new_tokens, seed, repeats
    As configured.
git
    ``provenance.commit``: of specjax, if it runs from a checkout.
uncertainty
    {"level", "method"} of the standard errors and intervals in the rows.
seconds
    Of a bench: those of its parts, by name, and "to the first row".
processes
    Of a bench: how many measured together.
peak_bytes
    Of a bench: see ``peak_bytes``.
curves
    Of a bench or replay of several draft lengths: ``curves``.
targets
    Of a bench with config.grid.targets: for each of them {"label", what ``provenance.target`` has,
    "compared"}. "compared" has an entry for each setting, as ``targets.between`` with "setting" and
    "methods" (method -> ``targets.tau_ratio``). The rows of such a target have its label as
    "target", and begin with it.
inputs_sha256
    Of a bench of a configuration: ``progress.inputs``, when it began.

A key that does not apply is null, in rows too. Files of earlier versions lack some keys.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax import __version__
from specjax.bench import metrics, proofs, provenance, uncertainty
from specjax.bench.passes import Method
from specjax.data import datastore, ngram_tables
from specjax.errors import UserError, on_disk
from specjax.files import machine, write_all
from specjax.types import LM, Accept, is_lossless

SCHEMA = 1  # of results.json and of trace.jsonl
# What a bench writes beside results.json. New results replace it.
BENCH_FILES = ("trace.jsonl", "answers", "plots", "report.html")
# What runs of mode train write: data, and what is trained.
DATA = ("generated", "features", f"{datastore.NAME}.json", f"{ngram_tables.NAME}.json")
TRAINED = ("model", "checkpoints", *DATA)
# Fields that only a bench measures (those along the text a replay too).
UNMEASURED = (
    *("autoregressive_tokens_per_second", "speedup", "predicted_speedup", "time_split"),
    *("lossless", "total_variation", "kl_divergence", "texts_changed", "standard_errors"),
    *("speedup_interval", "random_prompts", "argmax_gap", "width_gap"),
    *("tau_by_output_position", "tau_by_context_position"),
)
# Keys of results.json that ``write`` takes; null if they are not given.
SETTINGS = ("target", "max_new_tokens", "seed", "repeats", "uncertainty")


def new_row(
    name: str,
    rule: Accept,
    counts: metrics.Counts,
    *,
    temperature: float,
    batch_size: int,
    prompts: int,
    rate: float | None = None,
    category: str | None = None,
    status: str | None = None,
    outputs: Sequence[Sequence[int]] = (),
) -> dict:
    """A row without a baseline: what was not measured is None.

    ``rate`` is in tokens per second; ``status`` that of the lossless class (``proofs.status``);
    ``outputs`` are the new tokens of the texts that were counted.
    """
    return {
        "method": name,
        "accept": rule.name,
        "class": rule.lossless_class,
        "class_status": status,
        "temperature": temperature,
        "batch_size": batch_size,
        "prompts": prompts,
        **metrics.summary(counts),
        "repeated_4grams": metrics.repeated_4grams(outputs),
        "tokens_per_second": rate,
        **dict.fromkeys(UNMEASURED),
        "category": category,
        "target": None,
        "warm": False,
    }


class Decoded(NamedTuple):
    """What a row counts of one text."""

    category: str | None
    counts: metrics.Counts
    output: Sequence[int]
    emitted: Sequence[int] = ()  # the tokens of every round; () if they are not known
    prompt_tokens: int = 0


def rows_of_texts(
    method: Method, target: LM, texts: Sequence[Decoded], temperature: float, batch_size: int
) -> list[dict]:
    """The row of all texts, and one per category, in the order of the first text of each."""
    status = proofs.status(method.drafter, method.accept, target)
    named = dict.fromkeys(text.category for text in texts if text.category is not None)
    rows = []
    for category in (None, *named):
        counted = [text for text in texts if category in (None, text.category)]
        counts, outputs = [text.counts for text in counted], [text.output for text in counted]
        row = new_row(
            method.name,
            method.accept,
            metrics.total(counts),
            temperature=float(temperature),
            batch_size=batch_size,
            prompts=len(counted),
            category=category,
            status=status,
            outputs=outputs,
        )
        if all(text.emitted for text in counted):
            lengths = [text.prompt_tokens for text in counted]
            row["standard_errors"] = uncertainty.standard_errors(counts, [[x] for x in outputs])
            row |= uncertainty.along_text([[text.emitted] for text in counted], lengths)
        rows.append(row)
    return rows


# What the rows of one curve have in common.
CURVE = ("accept", "temperature", "batch_size", "prompt_set", "context", "new_tokens", "category")


def curves(rows: Sequence[dict]) -> list[dict]:
    """Tokens per round by the draft length, of methods that config.grid.gammas has repeated.

    Each has the keys of ``CURVE``, "method", "gammas", "tokens_per_round" (tau), "intervals" (95 %,
    Student t over prompts; None where there are fewer than two), "rounds" and "length", the
    curve as the key ``length`` of the drafter ``controlled`` takes it: "" if a length from 1 on
    is missing.
    """
    found: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        label = re.fullmatch(r"(.*), gamma (\d+)", row["method"])
        if label and row["block_efficiency"] is not None:
            settings = tuple((key, row.get(key)) for key in CURVE)
            found.setdefault((label[1], settings), {})[int(label[2])] = row
    result = []
    for (method, settings), by_gamma in found.items():
        gammas = sorted(by_gamma)
        ordered = [by_gamma[gamma] for gamma in gammas]
        taus = [row["block_efficiency"] for row in ordered]
        errors = [(row["standard_errors"] or {}).get("block_efficiency") for row in ordered]
        prompts = [row["prompts"] for row in ordered]
        whole = gammas == list(range(1, len(gammas) + 1))
        one = {"method": method, **dict(settings), "gammas": gammas, "tokens_per_round": taus}
        one["intervals"] = [*map(uncertainty.around, taus, errors, prompts)]
        one["rounds"] = [row["rounds"] for row in ordered]
        one["length"] = ",".join(f"{tau:.4g}" for tau in taus) if whole else ""
        result.append(one)
    return result


def peak_bytes() -> int | None:
    """The most memory that was used so far: of a device, or of the process if that is a CPU.

    None where it is not known.
    """
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    if sys.platform == "linux" and jax.default_backend() == "cpu":
        import resource  # not on every system

        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def head() -> dict:
    """The first keys of every results.json: schema, date, machine and versions."""
    device = jax.devices()[0]
    versions = {"specjax": __version__, "jax": jax.__version__}
    versions |= {"backend": jax.default_backend(), "device": device.device_kind}
    today = time.strftime("%Y-%m-%d")
    return {"schema": SCHEMA, "date": today, "machine": machine(), "versions": versions}


def write(
    config_json: str,
    workdir: Path,
    rows: Sequence[dict],
    files: Mapping[str, str] | None = None,
    *,
    command: str | None = None,
    **more,
) -> Path:
    """Writes config.json, metrics.jsonl and results.json; a failed run leaves none of them partial.

    Args:
        config_json: the text of config.json.
        workdir: the directory; it is created if it does not exist.
        rows: of results.json and metrics.jsonl.
        files: further files, relative name -> text.
        command: the command line, for results.json.
        more: further keys of results.json, those of ``SETTINGS`` among them.

    Returns:
        The path of results.json.

    Raises:
        UserError: the directory cannot be written.
    """
    facts = {key: more.pop(key, None) for key in SETTINGS} | {"git": provenance.commit()}
    results = head() | facts | {"rows": rows, "command": command, **more}
    contents = {
        "config.json": config_json,
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "results.json": json.dumps(results, indent=2) + "\n",
        **(files or {}),
    }
    with on_disk(f"cannot write into {workdir}", "choose another --workdir"):
        write_all(workdir, contents, before=functools.partial(_remove_earlier, workdir))
    return workdir / "results.json"


def _remove_earlier(workdir: Path) -> None:
    """Removes what an earlier bench wrote beside its results."""
    for name in BENCH_FILES:
        old = workdir / name
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)


def check_workdir(workdir: Path) -> None:
    """Checks, without writing, that results can be written later. Raises UserError."""
    path = workdir.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write into {workdir}: {existing} is not a writable directory; "
            "choose another --workdir"
        )


def breaks_its_claim(row: Mapping[str, Any]) -> bool:
    """Whether a row of a method that claims to be lossless failed its check."""
    claims = is_lossless(row.get("class", ""), sampled=row.get("temperature") != 0)
    return claims and (row.get("lossless") or {}).get("passed") is False


def check_no_training(workdir: Path, own: str = "") -> None:
    """Raises UserError if the directory holds a run of mode train, which this would overwrite.

    ``own`` is the name of what the command itself writes.
    """
    for name in TRAINED:
        if name != own and (workdir / name).exists():
            raise UserError(
                f"{workdir} holds a training run ({name}), which this would overwrite; "
                "choose another --workdir"
            )
