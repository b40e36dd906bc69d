"""What the studies share: a model shape, and the record of the machine and its load."""

from __future__ import annotations

import os
import time
from pathlib import Path

from specjax.models.transformer_config import TransformerConfig

# The shape of GPT-2. Without an end-of-sequence token, so that no text stops early.
GPT2 = TransformerConfig(
    family="gpt2",
    vocab_size=50257,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    max_positions=1024,
    attention_bias=True,
    mlp_bias=True,
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


def without_folder(argument: str) -> str:
    """A command line argument for the record: of a path only the last part."""
    flag, equals, value = argument.rpartition("=")
    return f"{flag}{equals}{Path(value).name}" if "/" in value else argument
