"""Several processes that compute together, on JAX's distributed runtime.

``start`` connects them. If one of them ends, the others end with one line on stderr: at once where
the operating system reports it, and otherwise after ``HEARTBEAT`` seconds.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax.errors import UserError
from specjax.sharding import watch

HEARTBEAT = 60  # seconds after which JAX ends the others if a process is silent
MEETING = 20  # seconds in which processes that JAX found connect to process 0
_UNWATCHED = (
    f"specjax: not all processes can connect to a free port of process 0; if one ends, JAX ends "
    f"the others after up to {HEARTBEAT} seconds, with a stack trace\n"
)


def start(
    coordinator: str = "", processes: int = 0, process: int = -1, *, timeout: int = 120
) -> None:
    """Connects this process with the others; call it before anything else of JAX.

    Args:
        coordinator: "host:port" of process 0; this port and the next one must be free there.
            "": found by JAX, under SLURM, Open MPI and on TPU pods.
        processes: how many there are; with ``coordinator``.
        process: the number of this one, from 0; with ``coordinator``.
        timeout: seconds to wait for the others.

    Raises UserError for arguments that do not fit, or if the others cannot be reached.
    """
    known: dict[str, Any] = {}
    host, port = _address(coordinator) if coordinator else ("", 0)
    if coordinator:
        _check_numbers(processes, process)
        watch.start(host, port, processes, process, timeout)
        known = {
            "coordinator_address": coordinator,
            "num_processes": processes,
            "process_id": process,
        }
    elif processes or process != -1:
        raise UserError(
            "the number of processes is given without a coordinator; give all three, or none where "
            "JAX finds them (SLURM, Open MPI, TPU pods)"
        )
    known |= {"initialization_timeout": timeout, "heartbeat_timeout_seconds": HEARTBEAT}
    try:
        jax.distributed.initialize(**known)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the processes could not be connected ({reason}); give the coordinator's host:port, "
            "the number of processes and the number of this one"
        ) from None
    if not coordinator and jax.process_count() > 1:
        _watch_found()


def _watch_found() -> None:
    """Watches processes that JAX found: all connect to a port that process 0 chooses."""
    own, server = jax.process_index(), None
    text = np.zeros(4096, np.uint8)  # more than eight names of the longest kind
    if own == 0:
        server = watch.listen()
        where = json.dumps([_own_names(), server.getsockname()[1]]).encode()
        text[: len(where)] = np.frombuffer(where, np.uint8)
    text = np.asarray(multihost_utils.broadcast_one_to_all(text), np.uint8)
    hosts, port = json.loads(text.tobytes().rstrip(b"\0"))
    met = watch.meet(server, hosts, port, jax.process_count(), own, MEETING)
    if not np.all(multihost_utils.process_allgather(np.asarray(met))):
        watch.stop()
        if own == 0:
            sys.stderr.write(_UNWATCHED)


def _own_names() -> list[str]:
    """Names and addresses under which other hosts may reach this one."""
    name = socket.gethostname()
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        found = set()
    local = {each for each in found if each.startswith("127.")}
    return list(dict.fromkeys([name, socket.getfqdn(name), *sorted(found - local)]))[:8]


def is_first() -> bool:
    """Whether this process writes files and prints."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def check_same(what: str, value: dict) -> None:
    """Raises UserError in every process unless all have the same ``value``, plain JSON."""
    if jax.process_count() == 1:
        return
    own = np.frombuffer(json.dumps(value, sort_keys=True).encode(), np.uint8)
    size = multihost_utils.process_allgather(np.asarray(own.size))
    padded = np.zeros(int(size.max()), np.uint8)
    padded[: own.size] = own
    texts = multihost_utils.process_allgather(padded)
    values = [json.loads(bytes(t[:n])) for t, n in zip(texts, size.reshape(-1), strict=True)]
    for number, other in enumerate(values):
        if other != values[0]:
            keys = sorted(values[0].keys() | other.keys())
            absent = object()
            key = next(k for k in keys if values[0].get(k, absent) != other.get(k, absent))
            watch.finish()  # every process raises this error: none is to end the others
            raise UserError(
                f"{what} of process {number} is not that of process 0: {key} is "
                f"{other.get(key)!r} there and {values[0].get(key)!r} here; "
                "start all processes with the same command"
            )


def _address(coordinator: str) -> tuple[str, int]:
    host, colon, port = coordinator.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise UserError(
            f"the coordinator is {coordinator!r}; it must be host:port, such as 10.0.0.1:8476"
        )
    return host.strip("[]"), int(port)  # brackets: an IPv6 address


def _check_numbers(processes: int, process: int) -> None:
    if processes < 1 or not 0 <= process < processes:
        raise UserError(
            f"process {process} of {processes} was given; processes are numbered from 0 to their "
            "number minus 1"
        )
