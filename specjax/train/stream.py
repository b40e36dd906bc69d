"""A stream of requests with a drafter that learns: its journal, its checkpoints, its progress.

``online.jsonl`` gets a line per request. A stream that was killed goes on from its last checkpoint:
position, ring, optimiser and parameters are those of an uninterrupted one, to the last bit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from specjax import files
from specjax.bench import metrics
from specjax.bench.passes import Job, Method
from specjax.errors import UserError
from specjax.train.checkpoint import Checkpoints
from specjax.train.display import Meter, report
from specjax.train.online import Learner, Served, State, serve

JOURNAL = "online.jsonl"


class Journal:
    """``online.jsonl``: a line per request."""

    def __init__(self, path: Path, requests: int):
        """Opens the file for appending, with the lines of the first ``requests`` requests alone.

        Raises UserError if it lacks some of them, or cannot be written.
        """
        self._path, self._file = path, None
        self.lines: list[dict[str, Any]] = []
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            self.lines = [line for line in map(_parsed, text.splitlines()) if line is not None]
            self.lines = [line for line in self.lines if line["request"] < requests]
            if [line["request"] for line in self.lines] != list(range(requests)):
                raise UserError(
                    f"{path} does not have the {requests} requests of the checkpoint beside it; "
                    "remove both to start again"
                )
            files.write_text(path, "".join(json.dumps(line) + "\n" for line in self.lines))
            self._file: TextIO | None = open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise self._failed(error) from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported by ``write``
            if self._file is not None:
                self._file.close()

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Appends lines. Raises UserError if they cannot be written."""
        assert self._file is not None
        try:
            self._file.writelines(json.dumps(line) + "\n" for line in lines)
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from None
        self.lines += lines

    def _failed(self, error: OSError) -> UserError:
        return UserError(
            f"{self._path} cannot be written ({error.strerror or error}); the same command "
            "resumes from the last checkpoint"
        )


def _parsed(line: str) -> dict[str, Any] | None:
    """The object of a line; None for half a line, which a killed run leaves."""
    try:
        value = json.loads(line)
        return value if isinstance(value["request"], int) else None
    except (ValueError, TypeError, LookupError):
        return None


def follow(
    job: Job,
    method: Method,
    learner: Learner,
    workdir: Path,
    config: dict[str, Any],
    checkpoint_every: int,
) -> tuple[State, list[dict[str, Any]]]:
    """Decodes the whole stream; returns the last state and the lines of the journal.

    Resumes from ``workdir/checkpoints``, which get a state after every ``checkpoint_every``
    requests and at the end. ``config`` is plain JSON that a resumed run must have in common with
    the stored one. Raises UserError for a stored run that does not fit.
    """
    state, total = learner.begin(), len(job.prompts)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", config, report))
        start, state = checkpoints.restore(state) or (0, state)
        journal = stack.enter_context(Journal(workdir / JOURNAL, start))
        meter = stack.enter_context(Meter("requests", total))
        if start:
            report(f"resuming from request {start} of {total} in {workdir}")
            meter.skip(start)
        saved = start
        batches = serve(job, method, learner, state) if start < total else ()
        for after, served in batches:
            state = after
            journal.write(_lines(job, served))
            whole = metrics.total(served.counts)
            meter.add(len(served.counts), whole.tokens, whole.rounds)
            done = served.first + len(served.counts)
            if done == total or done // checkpoint_every > saved // checkpoint_every:
                checkpoints.save(done, state)
                # The next batch reuses the buffers of the state.
                checkpoints.wait()
                saved = done
        return state, journal.lines


def _lines(job: Job, served: Served) -> list[dict[str, Any]]:
    """A line per request of a batch; the last one has the update after the batch."""
    lines, count = [], len(served.counts)
    for place, (counts, output) in enumerate(zip(served.counts, served.outputs, strict=True)):
        number = served.first + place
        summary = metrics.summary(counts)
        line = {
            "request": number,
            "category": job.categories[number] if job.categories else None,
            "updates": served.updates,
            "prompt_tokens": len(job.prompts[number]),
            "tokens": counts.tokens,
            "rounds": counts.rounds,
            "tested": int(counts.tested.sum()),
            "accepted": int(counts.passed.sum()),
            "alpha": summary["acceptance_rate"],
            "tau": summary["block_efficiency"],
            "wrong": served.wrong[place],
            "seconds": served.seconds / count,
            "update": served.update if place == count - 1 else None,
            "by_depth": [counts.tested.tolist(), counts.passed.tolist()],
            "verified": counts.verified,
            "output": output,
        }
        lines.append(line)
    return lines
