"""Several processes that compute together, on JAX's distributed runtime.

If one of them ends, the next exchange of data fails in the others. JAX aborts them at once if
it was process 0, and otherwise after ``HEARTBEAT`` seconds without an exchange.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax.errors import UserError

TIMEOUT = 120  # seconds that processes wait for each other at the start
HEARTBEAT = 60  # seconds after which JAX ends the others if a process is silent
VISIBLE = 10  # seconds in which a file of process 0 must be seen by the others
SHUTDOWN = 3600  # seconds that processes wait at the end for process 0, which writes the results
LOOK = 1.0  # seconds of work between two exchanges of ``Preemption``


def start(coordinator: str = "", processes: int = 0, process: int = -1) -> None:
    """Connects this process with the others; call it before anything else of JAX.

    Args:
        coordinator: "host:port" of process 0; the port must be free there. "": found by JAX, under
            SLURM, Open MPI and on TPU pods.
        processes: how many there are; with ``coordinator``.
        process: the number of this one, from 0; with ``coordinator``.

    Raises UserError for arguments that do not fit. JAX aborts the process, with a stack trace, if
    the others are not reached in time, or if process 0 ends before its work is done.
    """
    own: tuple = ()
    if coordinator:
        host, colon, port = coordinator.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) <= 65535:
            raise UserError(
                f"the coordinator is {coordinator!r}; it must be host:port, such as 10.0.0.1:8476"
            )
        if processes < 1 or not 0 <= process < processes:
            raise UserError(
                f"process {process} of {processes} was given; processes are numbered from 0 to "
                "their number minus 1"
            )
        own = (coordinator, processes, process)
    elif processes or process != -1:
        raise UserError(
            "the number of processes is given without a coordinator; give all three, or none where "
            "JAX finds them (SLURM, Open MPI, TPU pods)"
        )
    try:
        jax.distributed.initialize(
            *own,
            initialization_timeout=TIMEOUT,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the processes could not be connected ({reason}); give the coordinator's host:port, "
            "the number of processes and the number of this one"
        ) from None


def is_first() -> bool:
    """Whether this process writes files and prints."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def check_same(what: str, value: dict) -> None:
    """Raises UserError in every process unless all have the same ``value``, plain JSON."""
    values = [json.loads(text) for text in _of_all(json.dumps(value, sort_keys=True))]
    for number, other in enumerate(values):
        if other != values[0]:
            keys = sorted(values[0].keys() | other.keys())
            absent = object()
            key = next(k for k in keys if values[0].get(k, absent) != other.get(k, absent))
            raise UserError(
                f"{what} of process {number} is not that of process 0: {key} is "
                f"{other.get(key)!r} there and {values[0].get(key)!r} here; "
                "start all processes with the same command"
            )


# How long the other processes wait for the first one to read text and train a tokenizer, seconds.
_PREPARATION = 3600
_numbers = itertools.count()


def of_first(value: Any) -> Any:
    """A JSON value of the first process, in every process; all must call it in the same order."""
    if jax.process_count() == 1:
        return value
    return json.loads(_of_all(json.dumps(value) if is_first() else "")[0])


def first_error(message: str | None) -> str | None:
    """The message of the first process that has one, in every process; None if none has."""
    return next((text for text in _of_all(message or "") if text), None)


def check_shared(folder: Path) -> None:
    """Raises UserError in every process unless all see what the first one writes into a folder.

    The folder exists. All processes must call it.
    """
    if jax.process_count() == 1:
        return
    path = folder / f".{of_first(uuid.uuid4().hex)}"
    if is_first():
        path.touch()
    of_first(None)  # written before the others look
    end = time.monotonic() + VISIBLE
    while not (seen := path.exists()) and time.monotonic() < end:
        time.sleep(0.2)
    unseen = (
        f"process {jax.process_index()} does not see what process 0 writes into {folder}; give "
        "a --workdir on a disk that all of them share (a bucket: one that each host mounts)"
    )
    message = first_error(None if seen else unseen)
    if is_first():
        path.unlink()
    if message is not None:
        raise UserError(message)


class Preemption:
    """SIGTERM in a loop of steps: all processes end after the same step, having saved it.

        with Preemption() as preemption:
            for step in ...:
                ...
                if preemption.reached():
                    save(step)
                    preemption.end()

    The first signal is kept, a second one goes to the handler of before, at once. One process is
    enough: of several, all exchange what they have received every ``LOOK`` seconds of steps, by the
    step's number, so that none waits for another. Outside of the main thread nothing is handled.
    """

    def __init__(self) -> None:
        self._received = False
        self._steps = self._next = 0
        self._began = 0.0
        self._before: Any = None

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            # None: a handler that is not Python's, such as JAX's, which only notes the signal.
            self._before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
            if self._before != signal.SIG_IGN:
                signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, kind, *_) -> None:
        self._restore()
        if kind is None and self._received:  # after the last step
            self.end()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _receive(self, number: int, _) -> None:
        if self._received:
            self.end()
        self._received = True
        text = "SIGTERM: the run is saved after the next step; a second signal ends it at once"
        # The terminal may be gone, or another line half written.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            print(text, file=sys.stderr, flush=True)

    def reached(self) -> bool:
        """Whether to end after this step; called once after every step, by all processes."""
        if jax.process_count() == 1:
            return self._received
        self._steps += 1
        if self._steps == 1:  # was mostly compilation
            self._next, self._began = 2, time.monotonic()
            return self._of_any()
        if self._steps < self._next:
            return False
        ended = self._of_any()
        # A process that decided by its own clock would exchange at another step than the others.
        each = of_first((time.monotonic() - self._began) / (self._steps - 1))
        self._next = self._steps + max(int(LOOK / max(each, 1e-6)), 1)
        return ended

    def _of_any(self) -> bool:
        return bool(multihost_utils.process_allgather(np.asarray(self._received)).any())

    def end(self) -> NoReturn:
        """Gives SIGTERM to the handler of before: the process ends, or an exception is raised."""
        self._restore()
        self._received = False
        signal.raise_signal(signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM)  # the handler of before has returned


def _of_all(text: str) -> list[str]:
    """The texts of all processes, which must all call it."""
    if jax.process_count() == 1:
        return [text]
    encoded = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(encoded.size)).reshape(-1)
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: encoded.size] = encoded
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """The first process runs the block, then the others do: it writes files that they then read.

    The block must not compute on arrays of several processes.
    """
    # Imported here because it takes a second to import.
    from orbax.checkpoint import multihost

    wait = multihost.get_barrier_sync_fn()
    key = f"specjax prepares {next(_numbers)}"
    if not is_first():
        wait(key=key, timeout_ms=_PREPARATION * 1000)
    try:
        yield
    finally:
        # Also after an error: the others then meet the same one.
        if is_first():
            wait(key=key, timeout_ms=_PREPARATION * 1000)
