"""What the studies share: a model shape, options, the record of the machine and its load."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specjax.bench.results import machine
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


class Stopwatch:
    """The time since its creation, and the part of the machine that other processes used."""

    def __init__(self):
        self._began, self._others = time.perf_counter(), _other_processes()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def others_cpu(self) -> float:
        """CPU time of other processes, as a share of all cores; near 0 on an idle machine."""
        return (_other_processes() - self._others) / self.seconds / (os.cpu_count() or 1)


def _other_processes() -> float:
    """CPU seconds of other processes since the machine started; 0 where there is no /proc/stat."""
    if not Path("/proc/stat").exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - time.process_time()


def options(script: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with ``--out``: by default results.json beside the script."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(script).with_name("results.json")
    parser.add_argument("--out", type=Path, default=default, help="path of the results")
    return parser


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
