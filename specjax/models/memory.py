"""The memory of the device: a check before it is used, and one line where it did not suffice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from specjax.errors import OutOfMemory

LESS = "fewer rows (batch_size), fewer new tokens, or a dtype of two bytes (bfloat16, float16)"


def check(need: int, what: str, right: str) -> None:
    """Raises OutOfMemory if the first device has less than ``need`` bytes free.

    Devices that do not tell their memory, such as CPUs, pass. ``what`` needs the bytes; ``right``
    says what would fit.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return
    limit, free = stats["bytes_limit"], stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if need > free:
        raise OutOfMemory(
            f"{what} needs {need / 1e9:.2f} GB, and {jax.local_devices()[0].device_kind} has "
            f"{free / 1e9:.2f} GB free of the {limit / 1e9:.2f} GB that JAX may use; {right}"
        )


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Turns XLA's error about too little memory into OutOfMemory."""
    try:
        yield
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = str(error).partition("RESOURCE_EXHAUSTED: ")[2].partition("\n")[0].rstrip(".")
        raise OutOfMemory(
            f"the memory of the device is full ({message}); take {LESS}; a GPU gives JAX three "
            "quarters of its memory, and with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 more"
        ) from error
