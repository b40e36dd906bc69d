"""The processes of a run: how one ends by Ctrl-C or SIGTERM, and how several are connected.

It ends within two seconds. The main thread gets ``KeyboardInterrupt``, writes what was measured and
leaves. While it compiles, or waits for compiled code, Python raises nothing in it: a thread then
ends the process. The process leaves with ``os._exit``, because the interpreter would wait for
compilations in other threads, and these cannot be stopped. Training takes the first SIGTERM itself,
and saves before it ends (``sharding.Preemption``).

Programs that one run has compiled are read by the next one (``keep_programs``).

Of several processes the first one prints. Modes generate, bench and train run in several; the mesh
of the configuration has the devices of all.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import json
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import NoReturn

import jax
import jaxlib
from absl import flags
from rich.console import Console

from specjax import files, sharding
from specjax.config import Config
from specjax.errors import UserError
from specjax.report import terminal
from specjax.sharding import processes

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


def keep_programs() -> None:
    """Compiled programs are kept in the user's cache folder, for this machine and this jaxlib.

    Not with a jaxlib before 0.12: writing them has crashed 0.10.2 on CPUs. Nothing is changed where
    the user has chosen a folder (``JAX_COMPILATION_CACHE_DIR``).
    """
    old = tuple(map(int, jaxlib.__version__.split(".")[:2])) < (0, 12)
    if old or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    with contextlib.suppress(OSError, RuntimeError):  # a user without a folder of their own
        cpu = Path("/proc/cpuinfo")
        text = cpu.read_text() if cpu.exists() else platform.platform()
        # A program for a CPU may have instructions that another CPU lacks.
        features = sorted(set(re.findall(r"^(?:flags|Features|model).*", text, re.M)))
        name = hashlib.sha256("".join(features or text).encode()).hexdigest()[:12]
        folder = files.cache_folder() / f"programs-{jaxlib.__version__}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))


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
    """Ends the process if the main thread does not.

    The first signal of a kind is left to a handler that has been installed over ours.
    """
    seen: set[int] = set()
    while True:
        number = os.read(reader, 1)[0]
        if number in STATUS and (number in seen or signal.getsignal(number) is _raise):
            break
        seen.add(number)
    time.sleep(GRACE)
    terminal.fail(MESSAGE)
    leave(STATUS[signal.Signals(number)])


@contextlib.contextmanager
def held(done: Sized) -> Iterator[list[KeyboardInterrupt]]:
    """Keeps an interrupt of its body in the list; raises it at once where ``done`` is empty."""
    kept: list[KeyboardInterrupt] = []
    try:
        yield kept
    except KeyboardInterrupt as error:
        if not done:
            raise
        kept.append(error)


def leave(status: int) -> NoReturn:
    """Ends the process at once; the first one of several after ``LEAVING`` seconds."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream.isatty():
                stream.write(SHOW_CURSOR)
            stream.flush()
    if sharding.is_first() and jax.distributed.is_initialized():
        time.sleep(LEAVING)
    os._exit(status)


FLAGS = ("distributed", "coordinator", "processes", "process")  # of ``define_flags``
# Seconds that process 0 leaves the others for their own message: JAX aborts them when it ends.
LEAVING = 2.0
_WAITING = (
    f"waits for the other processes, up to {processes.TIMEOUT} s; all get the same coordinator and "
    "count, and each its own number"
)
# What an exchange of data says when the other side has ended.
_ENDED = ("Gloo", "Connection closed", "coordination service", "NCCL", "heartbeat")


def define_flags(values: flags.FlagValues) -> None:
    """Adds the flags."""
    found = "connect with the other processes, found by JAX: SLURM, Open MPI, TPU pods"
    number = "the number of this process, from 0"
    flags.DEFINE_bool("distributed", False, found, flag_values=values)
    flags.DEFINE_string("coordinator", "", "host:port of process 0", flag_values=values)
    flags.DEFINE_integer("processes", 0, "how many processes there are", flag_values=values)
    flags.DEFINE_integer("process", -1, number, flag_values=values)


@contextlib.contextmanager
def connected(values: flags.FlagValues, config: Config) -> Iterator[None]:
    """Connects the processes that the flags ``values`` name, and lets only process 0 print.

    Raises UserError for flags that do not fit, processes that cannot be reached or have another
    configuration, and if another process ends.
    """
    if not (values.distributed or values.coordinator or values.processes or values.process != -1):
        yield
        return
    _check_mode(config)
    if values.distributed and values.coordinator:
        raise UserError("--distributed finds the coordinator; give one of the two")
    with terminal.Status(Console(stderr=True, soft_wrap=True), _WAITING):
        sharding.start_processes(values.coordinator, values.processes, values.process)
    install_again()
    output = sys.stdout if sharding.is_first() else io.StringIO()
    with contextlib.redirect_stdout(output), _ending():
        sharding.check_same("the configuration", json.loads(config.to_json_best_effort()))
        yield


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """A process that fails ends without waiting for the others, which then fail too.

    It leaves when the interpreter ends, before JAX waits for the other processes.
    """
    try:
        yield
    except UserError:
        atexit.register(leave, 2)
        raise
    except KeyboardInterrupt as error:
        atexit.register(leave, status_of(error))
        raise
    except BaseException as error:
        if not any(word in str(error) for word in _ENDED):
            atexit.register(leave, 1)
            raise
        atexit.register(leave, 2)
        raise UserError(
            "another process has ended before its work was done; the same commands resume the run"
        ) from None


def _check_mode(config: Config) -> None:
    mode = config.get("mode")
    if mode not in ("generate", "bench", "train"):
        raise UserError(f"mode {mode} runs in one process; leave out --{', --'.join(FLAGS)}")
    if mode != "train" and not config.get("mesh"):
        raise UserError(
            "several processes decode with a mesh of all their devices; give config.mesh, "
            "such as data:-1"
        )
