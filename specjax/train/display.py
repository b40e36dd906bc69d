"""What a training run shows and records: a progress bar, metrics.jsonl, TensorBoard events, and where the time went."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.errors import UserError

PARTS: tuple[str, ...] = ("data", "rewrite", "step", "evaluate", "checkpoint")


def say(line: str) -> None:
    """Tells the user, on stderr."""
    print(line, file=sys.stderr, flush=True)


class Clock:
    """Wall time, divided: all is measured but the step, which is what remains; "rewrite" is text of the model's own."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets everything (compiling is not training)."""
        self._began = self._lap_began = time.perf_counter()
        self._whole, self._lap = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
        self._tokens = self._lap_tokens = 0

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Counts what runs inside to ``part``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - began)

    def add(self, part: str, seconds: float) -> None:
        """Counts some seconds to ``part``."""
        self._whole[part] += seconds
        self._lap[part] += seconds

    def count(self, tokens: int) -> None:
        """Counts tokens."""
        self._tokens += tokens
        self._lap_tokens += tokens

    def lap(self) -> tuple[float | None, dict[str, float] | None]:
        """(tokens a second of training, shares of the wall time) since the last lap; None if nothing was trained since."""
        now = time.perf_counter()
        told = _shares(self._lap_tokens, self._lap, now - self._lap_began)
        self._lap, self._lap_tokens, self._lap_began = dict.fromkeys(PARTS, 0.0), 0, now
        return told

    def summary(self) -> str | None:
        """One line about the whole run; None if nothing was trained after what was compilation."""
        rate, shares = _shares(self._tokens, self._whole, time.perf_counter() - self._began)
        if rate is None or shares is None:
            return None
        parts = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        return f"trained on {rate:,.0f} tokens/s; wall time: {parts}"


def _shares(
    tokens: int, parts: dict[str, float], seconds: float
) -> tuple[float | None, dict[str, float] | None]:
    if not tokens or seconds <= 0:
        return None, None
    step = max(seconds - sum(parts.values()), 0.0)
    training = seconds - parts["evaluate"] - parts["checkpoint"]
    return tokens / max(training, 1e-9), {
        name: (step if name == "step" else parts[name]) / seconds for name in PARTS
    }


class Log:
    """``metrics.jsonl`` and, beside it, ``tensorboard/``: one record a logged step, none of them twice."""

    def __init__(self, workdir: Path, start: int):
        """Opens both for appending, without what a killed run wrote after its last checkpoint (step ``start``).

        Raises ``UserError`` when they cannot be written.
        """
        self._start, self._events, self._folder = start, None, workdir / "tensorboard"
        path = workdir / "metrics.jsonl"
        partial = path.with_suffix(".partial")
        try:
            lines = path.read_bytes().splitlines() if path.exists() else ()
            partial.write_bytes(b"".join(line + b"\n" for line in lines if _up_to(line, start)))
            os.replace(partial, path)
            self._lines = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed in __exit__)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise UserError(f"{path} cannot be written ({error.strerror or error})") from None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_) -> None:
        for file in (self._lines, self._events):
            with contextlib.suppress(OSError):  # what a full disk did not take has been told
                if file is not None:
                    file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record: {"step": ..., name: number, or None, or a dict of numbers}. Raises ``UserError`` (full disk)."""
        try:
            self._lines.write(json.dumps(record) + "\n")
            self._lines.flush()
            self._show(record)
        except OSError as error:
            told = f"the metrics of step {record['step']} could not be written to {self._folder.parent} ({error.strerror})"
            raise UserError(f"{told}; the same command goes on from the last checkpoint") from error

    def _show(self, record: dict[str, Any]) -> None:
        """Writes the events for TensorBoard."""
        # Only here: where PyTorch is installed it imports that. And not its SummaryWriter: that writes from a thread of
        # its own, and on a full disk its queue would stop the run without a word.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.summary import scalar

        step = record["step"]
        if self._events is None:
            self._folder.mkdir(exist_ok=True)
            self._events = EventsWriter(str(self._folder / "events"), f".{self._start}")
            # TensorBoard drops what earlier files say about this step and later ones.
            self._events.write_event(
                Event(step=self._start + 1, session_log=SessionLog(status=SessionLog.START))
            )
        values = {}
        for name, value in record.items():
            if isinstance(value, dict):
                values |= {
                    f"{name.removesuffix('_share')}_{key}": number for key, number in value.items()
                }
            elif name != "step" and value is not None:
                values[name] = value
        for name, value in values.items():
            self._events.write_event(
                Event(step=step, wall_time=time.time(), summary=scalar(name, value))
            )
        self._events.flush()


def _up_to(line: bytes, step: int) -> bool:
    """Whether a line is a record of this step or of one before."""
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, TypeError, LookupError):  # half a line: the run was killed while writing it
        return False


class Display:
    """A progress bar with loss and remaining time on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, start: int, steps: int):
        console = Console(stderr=True)
        self._steps, self._first, self._began, self._said = steps, start, time.monotonic(), -10.0
        self._bar = None
        if console.is_terminal:
            columns = (
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, TextColumn("{task.fields[told]}"), console=console)
            self._task = self._bar.add_task("", total=steps, completed=start, told="")

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, step: int) -> None:
        """``step`` is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show(self, record: dict[str, Any]) -> None:
        """Tells what was logged."""
        names = ("loss", "heldout_loss", "heldout_alpha", "heldout_tau")
        parts = [f"{name} {record[name]:.3f}" for name in names if name in record]
        if record["tokens_per_second"]:
            parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        now, step = time.monotonic(), record["step"]
        if self._bar is not None:
            self._bar.update(self._task, told="  ".join(parts))
        elif now - self._said >= 10 or step == self._steps:
            left = (now - self._began) / (step - self._first) * (self._steps - step)
            say("  ".join([f"step {step}/{self._steps}", *parts, f"{left:.0f} s left"]))
            self._said = now
