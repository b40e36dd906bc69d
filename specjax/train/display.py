"""What a training run shows on the terminal: messages, progress bars, a status line."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax import sharding

_SECONDS = 10  # between two lines where there is no terminal


def report(line: str) -> None:
    """Prints a message for the user on stderr; with several processes only the first one does."""
    if sharding.is_first():
        print(line, file=sys.stderr, flush=True)


class _Bar(Progress):
    """A progress bar with a text ``status`` at its end, in a ``with`` block.

    It is disabled if stderr is not a terminal, and in all processes but the first one.
    """

    def __init__(self, title: str, total: int, done: int = 0):
        console = Console(stderr=True)
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        shown = console.is_terminal and sharding.is_first()
        status = TextColumn("{task.fields[status]}")
        super().__init__(*columns, status, console=console, disable=not shown)
        self.bar = self.add_task("", total=total, completed=done, status="")

    def stop(self) -> None:
        """Removes the bar; a disabled one of older versions of rich would print a blank line."""
        if not self.disable:
            super().stop()


def _values(record: dict[str, Any]) -> list[str]:
    """The main values of a record of training, as text; see docs/training.md for their meaning."""
    parts = []
    if "language" in record:
        parts.append(f"language loss {record['language']:.3f}")
    heads = "loss_per_token" in record
    name, unit = ("loss_per_token", " per head token") if heads else ("loss", "")
    text = f"loss {record[name]:.3f}{unit}"
    if "uniform_per_token" in record:
        text += f" (uniform guess {record['uniform_per_token']:.3f})"
    parts.append(text)
    if f"heldout_{name}" in record:
        parts.append(f"held-out {record[f'heldout_{name}']:.3f}")
    if "heldout_alpha" in record:
        parts.append(f"alpha {record['heldout_alpha']:.3f}")
    # A draft whose shape depends on the context has no forecast: its tau is the decoded one.
    taus = {}
    for name in ("heldout_decoded_tau_t", "heldout_tau_t"):
        taus |= {key.removeprefix(name): record[key] for key in record if key.startswith(name)}
    parts += [f"tau {tau:.2f} at temperature {degree}" for degree, tau in taus.items()]
    if record["tokens_per_second"]:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in record:
        parts.append(f"MFU {100 * record['mfu']:.1f} %")
    return parts


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Display(_Bar):
    """The progress of training: a bar with the loss on a terminal, elsewhere a line every ten
    seconds."""

    def __init__(self, start: int, steps: int):
        super().__init__("training", steps, start)
        self._steps, self._reported = steps, float("-inf")
        # (time, step) after the first step: that one is mostly compilation.
        self._first: tuple[float, int] | None = None

    def reach(self, step: int) -> None:
        """Shows that ``step`` is done."""
        self._first = self._first or (time.monotonic(), step)
        self.update(self.bar, completed=step)

    def show(self, record: dict[str, Any]) -> None:
        """Shows the main values of a record."""
        parts, now, step = _values(record), time.monotonic(), record["step"]
        if not self.disable:
            self.update(self.bar, status=", ".join(parts))
        elif now - self._reported >= _SECONDS or step == self._steps:
            began, first = self._first or (now, step)
            if first < step < self._steps:
                left = (now - began) / (step - first) * (self._steps - step)
                parts.append(f"{_duration(left)} left")
            report(", ".join([f"step {step}/{self._steps}", *parts]))
            self._reported = now


class Meter(_Bar):
    """The progress of text generation: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, title: str, total: int):
        """``total`` is the number of units: prompts, or tokens."""
        super().__init__(title, total)
        self._title, self._total = title, total
        self._done = self._skipped = self._tokens = self._rounds = 0
        # (time, tokens) at the end of the first batch.
        self._first: tuple[float, int] | None = None
        self._began = self._reported = time.monotonic()

    def __exit__(self, kind, *rest) -> None:
        super().__exit__(kind, *rest)
        if kind is None and self._tokens:
            report(f"{self._title}: {self._status()}")

    def skip(self, count: int) -> None:
        """Counts units that an earlier command made."""
        self._skipped += count
        self._show()

    def add(self, count: int, tokens: int, rounds: int) -> None:
        """Counts units that are done, with their tokens and their rounds (of one row each)."""
        self._done += count
        self._tokens += tokens
        self._rounds += rounds
        self._show()
        # The first batch is mostly compilation: its time does not predict the others.
        self._first = self._first or (time.monotonic(), self._tokens)

    def _status(self) -> str:
        parts = [f"{self._tokens:,} tokens"]
        began, before = self._first or (self._began, 0)
        if self._tokens == before:  # there was only one batch
            began, before = self._began, 0
        if (seconds := time.monotonic() - began) > 0:
            parts.append(f"{(self._tokens - before) / seconds:,.0f} tokens/s")
        if self._rounds:
            parts.append(f"{self._tokens / self._rounds:.2f} tokens per round")
        return ", ".join(parts)

    def _show(self) -> None:
        done, now = self._done + self._skipped, time.monotonic()
        if not self.disable:
            status = self._status() if self._tokens else ""
            self.update(self.bar, completed=min(done, self._total), status=status)
        elif now - self._reported >= _SECONDS and self._done:
            left = (now - self._began) / self._done * max(self._total - done, 0)
            parts = f"{done:,} of {self._total:,}", self._status(), f"{left:.0f} s left"
            report(f"{self._title}: {', '.join(parts)}")
            self._reported = now
