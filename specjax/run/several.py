"""One run in several processes: the flags that connect them, and who prints.

Modes generate and train; the mesh of the configuration has the devices of all processes.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator

from absl import flags
from rich.console import Console

from specjax import sharding
from specjax.config import Config
from specjax.errors import UserError
from specjax.report import terminal
from specjax.run import interrupts
from specjax.sharding import processes

FLAGS = ("distributed", "coordinator", "processes", "process")  # of ``define``
# Seconds that process 0 leaves the others for their own message: JAX aborts them when it ends.
LEAVING = 2.0
_WAITING = (
    f"waits for the other processes, up to {processes.TIMEOUT} s; all get the same coordinator and "
    "count, and each its own number"
)
# What an exchange of data says when the other side has ended.
_ENDED = ("Gloo", "Connection closed", "coordination service", "NCCL", "heartbeat")


def define(values: flags.FlagValues) -> None:
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
    interrupts.install_again()
    quiet = contextlib.nullcontext()
    if not sharding.is_first():
        quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, _ending():
        sharding.check_same("the configuration", json.loads(config.to_json_best_effort()))
        yield


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """A process that fails ends without waiting for the others, which then fail too."""
    try:
        yield
    except UserError:
        _leave(2)
        raise
    except KeyboardInterrupt as error:
        _leave(interrupts.status_of(error))
        raise
    except BaseException as error:
        if not any(word in str(error) for word in _ENDED):
            _leave(1)
            raise
        _leave(2)
        raise UserError(
            "another process has ended before its work was done; the same commands resume the run"
        ) from None


def _leave(status: int) -> None:
    """Ends this process when the interpreter ends, before JAX waits for the other processes."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if sharding.is_first():
            time.sleep(LEAVING)
        os._exit(status)

    atexit.register(leave)


def _check_mode(config: Config) -> None:
    if config.get("mode") not in ("generate", "train"):
        raise UserError(
            f"mode {config.get('mode')} runs in one process; leave out --{', --'.join(FLAGS)}"
        )
    if config.get("mode") == "generate" and not config.get("mesh"):
        raise UserError(
            "several processes decode with a mesh of all their devices; give config.mesh, "
            "such as data:-1"
        )
