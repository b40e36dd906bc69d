"""Ends this process when another one of the run has ended.

Every process holds a connection to process 0, which the operating system closes when a process
ends, however it ends. JAX itself notices it in an exchange of data, or after its heartbeat, and
then aborts with a stack trace.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time

from specjax.errors import UserError

DONE = b"d"  # sent by a process that has finished its work
FAILED = "specjax: {} has ended before its work was done; the same commands resume the run\n"


_peers: list[socket.socket] = []
_finished = threading.Event()


def start(host: str, port: int, processes: int, process: int, timeout: float) -> None:
    """Starts to watch the others, at the port after ``port``, the coordinator's.

    Raises UserError if they are not reached in ``timeout`` seconds.
    """
    if processes == 1:
        return
    peers = _accept(port, processes, timeout) if process == 0 else [_connect(host, port, timeout)]
    name = "another process" if process == 0 else "process 0 or another process"
    for peer in peers:
        threading.Thread(target=_wait, args=(peer, name), daemon=True).start()
    _peers.extend(peers)


def finish() -> None:
    """Says that this process has done its work: its end is no failure."""
    _finished.set()
    for peer in _peers:
        with contextlib.suppress(OSError):
            peer.sendall(DONE)


def fail(status: int) -> None:
    """Ends the others at once, and later this process with this exit status.

    Without it, JAX would wait for the others when the interpreter ends.
    """
    _finished.set()
    for peer in _peers:
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(leave)


def _accept(port: int, processes: int, timeout: float) -> list[socket.socket]:
    try:
        server = socket.create_server(("", port + 1))
    except OSError as error:
        raise UserError(
            f"port {port + 1}, the one after the coordinator's, cannot be used "
            f"({error.strerror}); take another coordinator port"
        ) from None
    end, peers = time.monotonic() + timeout, []
    with server:
        while len(peers) < processes - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                peers.append(_kept_alive(server.accept()[0]))
            except TimeoutError:
                raise UserError(
                    f"{len(peers) + 1} of {processes} processes came within {timeout} seconds; "
                    "start all of them, with the same coordinator"
                ) from None
    return peers


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    end = time.monotonic() + timeout
    while True:
        try:
            return _kept_alive(socket.create_connection((host, port + 1), timeout=5))
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"process 0 could not be reached at {host}, port {port + 1}, within {timeout} "
                    f"seconds ({error.strerror or error}); start it there, with --process=0 and "
                    f"--coordinator={host}:{port}"
                ) from None
            time.sleep(0.1)


def _kept_alive(peer: socket.socket) -> socket.socket:
    """The connection, without a time limit; the system notices a host that is gone."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return peer


def _wait(peer: socket.socket, name: str) -> None:
    """Ends this process when the connection ends before the other side has finished."""
    received = b""
    with contextlib.suppress(OSError):
        received = peer.recv(1)
    if received != DONE and not _finished.is_set():
        sys.stderr.write(FAILED.format(name))
        sys.stderr.flush()
        os._exit(2)
