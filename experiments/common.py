"""What the studies share: a model shape, options, the record of the machine and its load.

Times of a busy machine are not written: ``start`` refuses to measure where other processes use
more than ``QUIET`` of the machine, and ``checked`` makes the times null if they did so later.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specjax.bench.results import machine
from specjax.errors import UserError
from specjax.files import write_json
from specjax.models import families

# The shape of GPT-2. Without an end-of-sequence token, so that no text stops early.
GPT2 = families.shape(
    "gpt2",
    vocab_size=50257,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    max_positions=1024,
)

QUIET = 0.05  # the share of the machine that other processes may use while times are taken
SAMPLE = 1.0  # seconds for which ``start`` looks at the machine
NOT_QUIET = "not measured on a quiet machine"
# The fields of a row of a bench that are times, or made of times.
BENCH_TIMES = frozenset(
    {
        "tokens_per_second",
        "autoregressive_tokens_per_second",
        "speedup",
        "speedup_interval",
        "speedup_of_totals",
        "predicted_speedup",
        "system_efficiency",
        "time_split",
        "costs_ms",
        "spread",
        "compile_seconds",
        "prefill_seconds",
    }
)


def keep_runs(
    args: argparse.Namespace, key: str, study: str, read: Callable[[Path], dict[str, Any]]
) -> int:
    """Adds the records of finished runs to the results of a study; the exit status.

    ``args`` has ``workdirs`` and ``out``; the results have ``key``: name of a workdir -> what
    ``read`` gives. Records of other names stay as they are.
    """
    try:
        new = {folder.name: read(folder) for folder in args.workdirs}
    except UserError as error:
        print(f"{study}: {error}", file=sys.stderr)
        return 2
    known = json.loads(args.out.read_text())[key] if args.out.exists() else {}
    every = known | new
    names = " ".join(f"runs/{name}" for name in every)
    command = f"python experiments/{study}/run.py {names}"
    write_json(args.out, {"command": command, key: every})
    return 0


class Stopwatch:
    """The time since its creation, and the part of the machine that other processes used.

    Args:
        keep: whether times are written even if the machine was busy.
    """

    def __init__(self, keep: bool = False):
        self._began, self._others = time.perf_counter(), _other_processes()
        self.keep = keep

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def others_cpu(self) -> float:
        """CPU time of other processes, as a share of all cores; near 0 on an idle machine."""
        return (_other_processes() - self._others) / self.seconds / (os.cpu_count() or 1)


def _other_processes() -> float:
    """CPU seconds of other processes since the machine started; 0 where there is no /proc/stat.

    Child processes that have ended belong to the study.
    """
    if not Path("/proc/stat").exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    every = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return every - sum(os.times()[:4])  # of this process and of its children


def options(script: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with ``--out``, by default results.json beside the script, and ``--busy``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(script).with_name("results.json")
    parser.add_argument("--out", type=Path, default=default, help="path of the results")
    what = "on a machine with other work: measure, and write null for times (drop), or times (keep)"
    parser.add_argument("--busy", choices=("drop", "keep"), default="", help=what)
    return parser


def start(args: argparse.Namespace) -> Stopwatch:
    """A stopwatch, if other processes leave the machine alone; else one line and exit status 2."""
    if not args.busy:
        stopwatch = Stopwatch()
        time.sleep(SAMPLE)
        if (share := stopwatch.others_cpu) > QUIET:
            print(
                f"error: other processes use {share:.0%} of this machine, and times need one where "
                f"they use at most {QUIET:.0%}; wait until it is idle, or give --busy=drop to "
                "measure without times, or --busy=keep to write times that may be wrong",
                file=sys.stderr,
            )
            raise SystemExit(2)
    return Stopwatch(keep=args.busy == "keep")


def checked(result: dict[str, Any], stopwatch: Stopwatch, times: Collection[str]) -> dict[str, Any]:
    """A copy of ``result`` to be written: times that may be wrong are null.

    Args:
        result: of a study, or of a part of it, with rows.
        stopwatch: from ``start``; it ran while the times were taken.
        times: the fields at any depth that are times, or made of times.
    """
    result = possible(result, times)
    share = stopwatch.others_cpu
    if share <= QUIET or stopwatch.keep:
        return result
    line = f"other processes used {share:.0%} of this machine (at most {QUIET:.0%}"
    print(f"{line} is quiet): times are written as null", file=sys.stderr)
    return _without(result, times) | {"times": NOT_QUIET}


def possible(value: Any, times: Collection[str]) -> Any:
    """A copy without the times of rows whose speed-up is above their tokens per round.

    A round takes at least as long as a plain step where a pass over one token costs least, so such
    a speed-up is an error of the measurement: one line says so. Where the row has an interval of
    its speed-up, only one that is above tau as a whole is an error; without an interval the
    speed-up may be above tau by the share that other processes may use, ``QUIET``.
    """
    if isinstance(value, list | tuple):
        return [possible(each, times) for each in value]
    if not isinstance(value, dict):
        return value
    if error := _impossible(value):
        print(f"error: {error}", file=sys.stderr)
        return _without(value, times)
    return {key: possible(each, times) for key, each in value.items()}


def _impossible(row: dict[str, Any]) -> str:
    """Why the speed-up of a row cannot be right; empty if it can."""
    names = ("measured_tokens", "tau", "block_efficiency")
    tau = next((row[name] for name in names if row.get(name) is not None), None)
    if tau is None and row.get("steps") and row.get("passes"):  # of beams
        tau = row["steps"] / row["passes"]
    speeds = [row[name] for name in ("speedup", "speedup_of_totals") if row.get(name) is not None]
    if tau is None or not speeds:
        return ""
    lowest = (row.get("speedup_interval") or [None])[0]
    if (max(speeds) / (1 + QUIET) if lowest is None else lowest) <= tau:
        return ""
    kept = ("method", "name", "view", "pair", "category", "temperature", "batch_size", "gamma")
    label = ", ".join(f"{key} {row[key]}" for key in kept if row.get(key) is not None)
    return (
        f"{label}: the speed-up {max(speeds):.2f} is above the {tau:.2f} tokens per round, "
        "the most where a pass over one token costs least; the times of this row are null"
    )


def _without(value: Any, times: Collection[str]) -> Any:
    """A copy in which the fields of these names are null."""
    if isinstance(value, list | tuple):
        return [_without(each, times) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: None if key in times else _without(each, times) for key, each in value.items()}


def record(script: str, argv: Sequence[str], stopwatch: Stopwatch) -> dict[str, Any]:
    """The command, the date, the machine with its load, and the versions."""
    command = f"experiments/{Path(script).parent.name}/{Path(script).name}"
    return {
        "command": shlex.join(["python", command, *argv]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "others_cpu": stopwatch.others_cpu,
        "versions": {name: version(name) for name in ("specjax", "jax")},
    }


def without_folder(argument: str) -> str:
    """A command line argument for the record: of paths, separated by commas, only the last part."""
    flag, equals, value = argument.rpartition("=")
    if "/" not in value or " " in value:  # "1/4 of the text" is no path
        return argument
    return f"{flag}{equals}{','.join(Path(path).name for path in value.split(','))}"
