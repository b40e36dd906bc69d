"""What a run leaves behind: rows of one schema, and the files of a workdir, written at the end and all at once."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

import jax

from specjax import __version__
from specjax.bench import metrics
from specjax.config import Config
from specjax.errors import UserError
from specjax.types import Accept

SCHEMA = 1
LEFT = (
    "trace.jsonl",
    "answers",
    "plots",
    "report.html",
)  # what a bench leaves beside, and belongs to its results only
UNMEASURED = (
    "autoregressive_tokens_per_second",
    "speedup",
    "predicted_speedup",
    "time_split",
    "lossless",
)


def row(
    name: str,
    rule: Accept,
    counts: metrics.Counts,
    *,
    temperature: float,
    batch_size: int,
    prompts: int,
    rate: float | None = None,
    category: str | None = None,
) -> dict:
    """A row without a baseline: what was not measured is None. ``rate`` is in tokens per second."""
    return {
        "method": name,
        "accept": rule.name,
        "class": rule.lossless_class,
        "temperature": temperature,
        "batch_size": batch_size,
        "prompts": prompts,
        **metrics.summary(counts),
        "tokens_per_second": rate,
        **dict.fromkeys(UNMEASURED),
        "category": category,
        "warm": False,
    }


def head() -> dict:
    """What every results.json begins with: schema, date, machine and versions."""
    device = jax.devices()[0]
    versions = {"specjax": __version__, "jax": jax.__version__}
    versions |= {"backend": jax.default_backend(), "device": device.device_kind}
    return {
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions,
    }


def machine() -> dict:
    """The host: its processor, as /proc/cpuinfo calls it, and the cores that this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": names[0] if names else platform.processor() or "unknown", "cores": cores}


def write(
    config: Config, workdir: Path, rows: list[dict], files: dict[str, str] | None = None, **more
) -> Path:
    """config.json, metrics.jsonl and results.json (whose path is returned): a failed run leaves none of them half-written.

    ``files`` are further texts by name, ``more`` further keys of results.json.

    Raises UserError for a directory that cannot be written.
    """
    results = head() | {"rows": rows, **more}
    files = {
        "config.json": config.to_json_best_effort(indent=2) + "\n",
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "results.json": json.dumps(results, indent=2) + "\n",
    } | (files or {})
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new.", dir=workdir) as fresh:
            for name, text in files.items():
                (Path(fresh) / name).parent.mkdir(exist_ok=True)
                (Path(fresh) / name).write_text(text, encoding="utf-8")
            for name in LEFT:  # of earlier results
                old = workdir / name
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink(
                    missing_ok=True
                )
            for name in files:
                (workdir / name).parent.mkdir(exist_ok=True)
                (Path(fresh) / name).replace(workdir / name)
    except OSError as error:
        raise UserError(
            f"cannot write into {workdir}: {error.strerror}; choose another --workdir"
        ) from None
    return workdir / "results.json"


def check_workdir(workdir: Path) -> None:
    """Finds out before any work is done, and without writing, whether results can be written. Raises UserError."""
    there = workdir.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write into {workdir}: {there} is not a writable directory; choose another --workdir"
        )
