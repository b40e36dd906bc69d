"""Ctrl-C and SIGTERM: the process of the command line ends within two seconds.

The main thread gets ``KeyboardInterrupt``, writes what was measured and leaves. While it compiles,
or waits for compiled code, Python raises nothing in it: a thread then ends the process. The process
leaves with ``os._exit``, because the interpreter would wait for compilations in other threads, and
these cannot be stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import NoReturn

from specjax.report import terminal

GRACE = 1.8  # seconds that the main thread has to write and to leave
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
MESSAGE = "interrupted; the same command resumes training runs and benches"
SHOW_CURSOR = "\x1b[?25h"  # progress bars and spinners hide it

_first: int | None = None  # the first of these signals
_handled: list[signal.Signals] = []


class Terminated(KeyboardInterrupt):
    """SIGTERM has arrived."""


def status_of(error: KeyboardInterrupt) -> int:
    """The exit status of a process that was interrupted."""
    return STATUS[signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT]


def install() -> None:
    """Handles both signals in this process, unless the caller has set them to be ignored.

    For the main thread of a process that runs one command.
    """
    _handled.extend(n for n in STATUS if signal.getsignal(n) is not signal.SIG_IGN)
    install_again()
    # The number of a signal is written there at once, whatever the main thread does.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader,), name="interrupts", daemon=True).start()


def install_again() -> None:
    """Handles the signals of ``install`` again: JAX, when it connects processes, takes SIGTERM."""
    for number in _handled:
        signal.signal(number, _raise)


def _raise(number: int, _) -> None:
    """Raises the exception of the first signal; the process ends soon, so others do nothing."""
    global _first
    if _first is None:
        _first = number
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _wait(reader: int) -> None:
    """Ends the process if the main thread does not."""
    number = 0
    while number not in STATUS:
        number = os.read(reader, 1)[0]
    time.sleep(GRACE)
    terminal.fail(MESSAGE)
    leave(STATUS[signal.Signals(number)])


def leave(status: int) -> NoReturn:
    """Ends the process at once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream.isatty():
                stream.write(SHOW_CURSOR)
            stream.flush()
    os._exit(status)
