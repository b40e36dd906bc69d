"""A stream of requests with a drafter that learns: its journal, its checkpoints, its progress.

``online.jsonl`` gets a line per request. A stream that was killed goes on from its last checkpoint:
position, ring, optimiser and parameters are those of an uninterrupted one, to the last bit.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from specjax.bench import metrics
from specjax.bench.passes import Job, Method
from specjax.errors import UserError
from specjax.train.checkpoint import Checkpoints
from specjax.train.display import Meter, report
from specjax.train.online import Learner, Served, State, serve
from specjax.train.records import Lines, writing

JOURNAL = "online.jsonl"


def _journal(path: Path, requests: int) -> Lines:
    """``online.jsonl``, opened for appending, with the lines of the first ``requests`` requests.

    Raises UserError if it lacks some of them, or cannot be written.
    """

    def check(lines: list[dict[str, Any]]) -> None:
        if [line["request"] for line in lines] != list(range(requests)):
            raise UserError(
                f"{path} does not have the {requests} requests of the checkpoint beside it; "
                "remove both to start again"
            )

    return Lines(path, lambda line: line["request"] < requests, check)


def follow(
    job: Job, method: Method, learner: Learner, workdir: Path, config: dict, checkpoint_every: int
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
        journal = stack.enter_context(contextlib.closing(_journal(workdir / JOURNAL, start)))
        meter = stack.enter_context(Meter("requests", total))
        if start:
            report(f"resuming from request {start} of {total} in {workdir}")
            meter.skip(start)
        saved = start
        batches = serve(job, method, learner, state) if start < total else ()
        for state, served in batches:
            with writing(f"{workdir / JOURNAL} cannot be written"):
                journal.write([_line(job, served, place) for place in range(len(served.counts))])
            whole = metrics.total(served.counts)
            meter.add(len(served.counts), whole.tokens, whole.rounds)
            done = served.first + len(served.counts)
            if done == total or done // checkpoint_every > saved // checkpoint_every:
                checkpoints.save(done, state)
                # The next batch reuses the buffers of the state.
                checkpoints.wait()
                saved = done
        return state, journal.values


def _line(job: Job, served: Served, place: int) -> dict[str, Any]:
    """The line of a request of a batch; that of the last one has the update after the batch."""
    counts, count = served.counts[place], len(served.counts)
    number, summary = served.first + place, metrics.summary(counts)
    return {
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
        "output": served.outputs[place],
    }
