"""Ends this process when another one of the run has ended.

Every process holds a connection to process 0, which the operating system closes when a process
ends, however it ends. JAX itself notices it in an exchange of data, or after its heartbeat, and
then aborts with a stack trace.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from specjax.errors import UserError

DONE = b"d"  # sent by a process that has finished its work
WELCOME = "welcome"
FAILED = "specjax: {} has ended before its work was done; the same commands resume the run\n"
LEAVING = 2.0  # seconds that a process which fails waits for the others to end


class _Peer(NamedTuple):
    """A connection, and how it ended."""

    connection: socket.socket
    name: str
    done: threading.Event
    closed: threading.Event


_peers: list[_Peer] = []
_leaving = threading.Event()
_first = False


def start(host: str, port: int, processes: int, process: int, timeout: float) -> None:
    """Starts to watch the others, at the port after ``port``, the coordinator's.

    Raises UserError if they are not reached in ``timeout`` seconds, or if the processes were
    started with numbers that do not fit each other.
    """
    if processes == 1:
        return
    if process == 0:
        _watch(_accept(_coordinator(port), processes, timeout), first=True)
        return
    try:
        connection = _connect([host], port + 1, timeout)
    except OSError as error:
        raise UserError(
            f"process 0 could not be reached at {host}, port {port + 1}, within {timeout} "
            f"seconds ({error.strerror or error}); start it there, with --process=0 and "
            f"--coordinator={host}:{port}"
        ) from None
    _watch([_welcomed(connection, host, processes, process, timeout)], first=False)


def listen() -> socket.socket:
    """In process 0: a socket at a free port, for ``meet``."""
    return socket.create_server(("", 0))


def meet(
    server: socket.socket | None,
    hosts: Sequence[str],
    port: int,
    processes: int,
    process: int,
    timeout: float,
) -> bool:
    """Starts to watch processes that know each other's numbers; False: not all are reached.

    ``server`` is process 0's ``listen``, None in the others. They try its names ``hosts`` in turn.
    """
    try:
        if server is not None:
            _watch(_accept(server, processes, timeout), first=True)
        else:
            connection = _connect(hosts, port, timeout)
            _watch([_welcomed(connection, hosts[0], processes, process, timeout)], first=False)
    except (OSError, UserError):
        return False
    return True


def stop() -> None:
    """Ends the watch: the end of another process no longer ends this one."""
    _leaving.set()
    for peer in _peers:
        peer.connection.close()
    _peers.clear()


def _watch(connections: Sequence[socket.socket], first: bool) -> None:
    global _first
    _first = first
    name = "another process" if first else "process 0 or another process"
    for connection in connections:
        peer = _Peer(connection, name, threading.Event(), threading.Event())
        threading.Thread(target=_wait, args=(peer,), daemon=True).start()
        _peers.append(peer)


def finish() -> None:
    """Returns when every process has done its work; its end is then no failure.

    If another one fails before, this process ends (see ``_wait``).
    """
    if _first:  # the last one to write: the others wait for it
        _wait_for_all()
        _leaving.set()  # before the others may end
        _send_done()
    else:
        _send_done()
        _wait_for_all()
        _leaving.set()


def _wait_for_all() -> None:
    for peer in _peers:
        peer.done.wait()


def _send_done() -> None:
    for peer in _peers:
        with contextlib.suppress(OSError):
            peer.connection.sendall(DONE)


def fail(status: int) -> None:
    """Ends the others at once, and later this process with this exit status.

    Without it, JAX would wait for the others when the interpreter ends.
    """
    _leaving.set()
    for peer in _peers:
        with contextlib.suppress(OSError):
            peer.connection.shutdown(socket.SHUT_WR)

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        wait_for_ends(LEAVING)
        os._exit(status)

    atexit.register(leave)


def wait_for_ends(seconds: float) -> None:
    """Waits for the others to end: JAX aborts a process whose coordinator has ended."""
    end = time.monotonic() + seconds
    for peer in _peers:
        peer.closed.wait(max(0.0, end - time.monotonic()))


def _coordinator(port: int) -> socket.socket:
    """The socket of process 0, at the port after the coordinator's. Raises UserError."""
    try:
        return socket.create_server(("", port + 1))
    except OSError as error:
        raise UserError(
            f"port {port + 1}, the one after the coordinator's, cannot be used "
            f"({error.strerror}); start process 0 once, or take another coordinator port"
        ) from None


def _accept(server: socket.socket, processes: int, timeout: float) -> list[socket.socket]:
    """The connections of all others. Raises UserError if one is missing or has a wrong number."""
    end, found = time.monotonic() + timeout, {}
    with server:
        while len(found) < processes - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection = server.accept()[0]
            except TimeoutError:
                raise UserError(
                    f"{len(found) + 1} of {processes} processes came within {timeout} seconds; "
                    "start all of them, with the same coordinator"
                ) from None
            _greet(connection, processes, found)
    for connection in found.values():
        connection.sendall(_line(WELCOME))
    return list(found.values())


def _greet(connection: socket.socket, processes: int, found: dict[int, socket.socket]) -> None:
    """Adds a process that has connected; something else is ignored.

    Raises UserError, also in that process, for a number that does not fit.
    """
    try:
        connection.settimeout(5)
        total, number = json.loads(_read_line(connection))["specjax"]
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()
        return
    if total != processes:
        problem = f"process {number} was started for {total} processes, process 0 for {processes}"
    elif number in found:
        problem = f"process {number} was started twice"
    else:
        found[number] = _kept_alive(connection)
        return
    problem += "; give every process its own number, and all the same count"
    for each in (connection, *found.values()):
        with contextlib.suppress(OSError):
            each.sendall(_line(problem))
    raise UserError(problem)


def _connect(hosts: Sequence[str], port: int, timeout: float) -> socket.socket:
    """A connection to the first of the hosts that answers. Raises OSError after ``timeout``."""
    end = time.monotonic() + timeout
    while True:
        for host in hosts:
            left = end - time.monotonic()
            try:
                return socket.create_connection((host, port), timeout=max(0.1, left / len(hosts)))
            except OSError:
                if host == hosts[-1] and time.monotonic() > end:
                    raise
        time.sleep(0.1)


def _welcomed(
    connection: socket.socket, host: str, processes: int, process: int, timeout: float
) -> socket.socket:
    """The connection, after process 0 has met all others. Raises UserError."""
    try:
        connection.settimeout(max(1.0, timeout))
        connection.sendall(_line({"specjax": [processes, process]}))
        answer = json.loads(_read_line(connection))
    except (OSError, ValueError):
        raise UserError(
            f"process 0 at {host} did not start the run within {timeout} seconds; "
            "start all processes, with the same coordinator"
        ) from None
    if answer != WELCOME:
        raise UserError(answer)
    return _kept_alive(connection)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(1)
        if not part or len(line) > 1000:
            raise OSError("the connection ended")
        line += part
    return line


def _kept_alive(connection: socket.socket) -> socket.socket:
    """The connection, without a time limit; the system notices a host that is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return connection


def _wait(peer: _Peer) -> None:
    """Ends this process when a connection ends before the other side has finished."""
    received = DONE
    while received == DONE:
        try:
            received = peer.connection.recv(1)
        except OSError:
            received = b""
        if received == DONE:
            peer.done.set()
    peer.closed.set()
    # Process 0 ends first: the others wait for it when they are done.
    if not (_leaving.is_set() or (peer.done.is_set() and not _first)):
        sys.stderr.write(FAILED.format(peer.name))
        sys.stderr.flush()
        os._exit(2)
