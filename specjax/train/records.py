"""What a training run records: metrics.jsonl, TensorBoard events, and the use of wall time."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax import files, sharding
from specjax.errors import on_disk

# What wall time is divided into, and how the summary of a run names it. "rewrite" is
# ``Task.rewrite``, "step" is what remains. The first evaluation compiles its programs.
_NAMES = {
    "data": "waiting for data",
    "rewrite": "on-policy text",
    "step": "steps",
    "first_evaluation": "first evaluation (mostly compilation)",
    "evaluate": "other evaluations",
    "checkpoint": "checkpoints",
}
PARTS: tuple[str, ...] = tuple(_NAMES)
_NOT_TRAINING = ("first_evaluation", "evaluate", "checkpoint")


class Clock:
    """Wall time, divided into ``PARTS``: all are measured except the step, which is the rest."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Resets everything to zero (compilation is not training)."""
        self._began = self._lap_began = time.perf_counter()
        self._whole, self._lap = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
        self._tokens = self._lap_tokens = 0

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Adds the time of the block to ``part``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - began)

    def add(self, part: str, seconds: float) -> None:
        """Adds some seconds to ``part``."""
        self._whole[part] += seconds
        self._lap[part] += seconds

    def count(self, tokens: int) -> None:
        """Adds tokens that were trained on."""
        self._tokens += tokens
        self._lap_tokens += tokens

    def lap(self) -> tuple[float | None, dict[str, float] | None]:
        """(tokens per second of training, shares of the wall time) since the last lap.

        (None, None) if there was no training step since.
        """
        now = time.perf_counter()
        result = _shares(self._lap_tokens, self._lap, now - self._lap_began)
        self._lap, self._lap_tokens, self._lap_began = dict.fromkeys(PARTS, 0.0), 0, now
        return result

    def summary(self) -> str | None:
        """One line about the whole run; None if there was no training step after compilation."""
        seconds = time.perf_counter() - self._began
        rate, shares = _shares(self._tokens, self._whole, seconds)
        if rate is None or shares is None:
            return None
        parts = [f"{_NAMES[name]} {100 * share:.0f} %" for name, share in shares.items() if share]
        return (
            f"trained on {rate:,.0f} tokens/s; {seconds:.0f} s after the first step: "
            f"{', '.join(parts)}"
        )


def _shares(
    tokens: int, parts: dict[str, float], seconds: float
) -> tuple[float | None, dict[str, float] | None]:
    if not tokens or seconds <= 0:
        return None, None
    step = max(seconds - sum(parts.values()), 0.0)
    training = seconds - sum(parts[part] for part in _NOT_TRAINING)
    shares = {name: (step if name == "step" else parts[name]) / seconds for name in PARTS}
    return tokens / max(training, 1e-9), shares


def writing(problem: str) -> contextlib.AbstractContextManager[None]:
    """Turns an error of the operating system into one line that begins with ``problem``."""
    return on_disk(problem, "the same command resumes from the last checkpoint")


class Lines:
    """A file of JSON lines that grows; lines after the last checkpoint of a run are removed."""

    def __init__(
        self,
        path: Path,
        keep: Callable[[Any], bool],
        check: Callable[[list[Any]], None] = lambda values: None,
    ):
        """Opens the file for appending, with the lines for whose value ``keep`` is true.

        Half a line, and a line for which ``keep`` fails, is left out. ``check`` sees the values
        before the file is changed. Raises UserError if it cannot be written.
        """
        with writing(f"{path} cannot be written"):
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            self.values = [each for line in text.splitlines() for each in _kept(line, keep)]
            check(self.values)
            files.write_text(path, "".join(json.dumps(each) + "\n" for each in self.values))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed in ``close``)

    def write(self, values: Sequence[Any]) -> None:
        """Appends lines. Raises OSError."""
        self._file.writelines(json.dumps(each) + "\n" for each in values)
        self._file.flush()
        self.values += values

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):  # a full disk has been reported after ``write``
            self._file.close()


def _kept(line: str, keep: Callable[[Any], bool]) -> list[Any]:
    """The value of a line, or nothing."""
    try:
        value = json.loads(line)
        return [value] if keep(value) else []
    except (ValueError, TypeError, LookupError):
        return []


class Log:
    """``metrics.jsonl`` and, next to it, ``tensorboard/``: one record per logged step."""

    def __init__(self, workdir: Path, start: int):
        """Opens both for appending, without the records after step ``start``.

        With several processes only the first one writes. A killed run may have written such
        records after its last checkpoint. Raises UserError if the files cannot be written.
        """
        self._start, self._events, self._folder = start, None, workdir / "tensorboard"
        self._lines = None
        if sharding.is_first():
            self._lines = Lines(workdir / "metrics.jsonl", lambda line: line["step"] <= start)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_) -> None:
        if self._lines is not None:
            self._lines.close()
        with contextlib.suppress(OSError):  # a full disk has been reported by ``write``
            if self._events is not None:
                self._events.close()

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record: {"step": ..., name: number, or None, or a dict of numbers}.

        Raises UserError if it cannot be written (a full disk).
        """
        if self._lines is None:
            return
        place = f"could not be written to {self._folder.parent}"
        with writing(f"the metrics of step {record['step']} {place}"):
            self._lines.write([record])
            self._write_events(record)

    def _write_events(self, record: dict[str, Any]) -> None:
        """Writes the record as events for TensorBoard."""
        # Imported here because it imports PyTorch where that is installed. SummaryWriter is not
        # used: it writes from its own thread, and on a full disk its queue would block the run
        # without a message.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboardX.summary import scalar

        if self._events is None:
            self._folder.mkdir(exist_ok=True)
            self._events = EventsWriter(str(self._folder / "events"), f".{self._start}")
            # TensorBoard drops the events of earlier files from this step on.
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(step=self._start + 1, session_log=start))
        for name, value in _scalars(record):
            event = Event(step=record["step"], wall_time=time.time(), summary=scalar(name, value))
            self._events.write_event(event)
        self._events.flush()


def _scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, number) of a record; the entries of a dict become numbers with longer names."""
    for name, value in record.items():
        if isinstance(value, dict):
            prefix = name.removesuffix("_share")
            yield from ((f"{prefix}_{key}", number) for key, number in value.items())
        elif name != "step" and value is not None:
            yield name, value
