"""Several processes in one training run: the first one writes, and all take the same decisions."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from specjax.sharding import is_first

# How long the other processes wait for the first one to read text and train a tokenizer, seconds.
_PREPARATION = 3600
_numbers = itertools.count()


def of_first(value: Any) -> Any:
    """A JSON value of the first process, in every process; all must call it in the same order."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8) if is_first() else np.zeros(0)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = text if is_first() else np.zeros(size, np.uint8)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(text).astype(np.uint8)))


def first_error(message: str | None) -> str | None:
    """The message of the first process that has one, in every process; None if none has."""
    if jax.process_count() == 1:
        return message
    text = np.zeros(1024, np.uint8)
    encoded = (message or "").encode()[: len(text)]
    text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    every = np.asarray(multihost_utils.process_allgather(text)).astype(np.uint8)
    messages = (bytes(row).rstrip(b"\0").decode(errors="replace") for row in every)
    return next((each for each in messages if each), None)


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """The first process runs the block, then the others do: it writes files that they then read.

    The block must not compute on arrays of several processes.
    """
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
