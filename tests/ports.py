"""Ports for tests with several processes."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that is free, and the next one is too."""
    for _ in range(100):
        with socket.socket() as first:
            first.bind(("", 0))
            port = first.getsockname()[1]
            with socket.socket() as second:
                try:
                    second.bind(("", port + 1))
                except OSError:
                    continue
                return port
    raise AssertionError("no two free ports")
