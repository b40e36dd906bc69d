"""Writes safetensors files one tensor at a time.

The writer of the safetensors library needs all tensors of a file in memory. Here a tensor is
gathered from the devices just before it is written and released after, so the host holds one of
them. The bytes of a file are those of the library. Format: 8 bytes with the length of a JSON
header, the header (name -> dtype, shape, place of its bytes), the bytes of all tensors
(huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sharding

# In the order of the library: the tensors of a file are sorted by dtype, the last one first, then
# by name.
DTYPES = {"bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16"}
DTYPES |= {"float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32"}
DTYPES |= {"float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64"}
_RANK = {name: rank for rank, name in enumerate(DTYPES)}
_CHUNK = 1 << 24  # bytes written at once


class Tensor(NamedTuple):
    """A tensor that is not in the host's memory yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def tensor(value: Any) -> Tensor:
    """The tensor of an array; of a ``jax.Array`` on any devices ``read`` makes a copy."""
    return Tensor(tuple(value.shape), np.dtype(value.dtype), functools.partial(gather, value))


def gather(value: Any) -> np.ndarray:
    """An array on the host. With several processes all must call it, in the same order.

    The result is released as soon as the caller drops it: ``np.asarray`` of a ``jax.Array`` stays
    in memory as long as that array.
    """
    if isinstance(value, jax.Array) and (value.is_fully_addressable or value.is_fully_replicated):
        return np.asarray(jnp.copy(value))
    return sharding.fetch(value)


def write(file: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """Writes a file; None: only reads the tensors, as processes that do not write must do.

    Raises OSError.
    """
    names = sorted(tensors, key=lambda name: (-_RANK[tensors[name].dtype.name], name))
    if file is None:
        for name in names:
            tensors[name].read()
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape, dtype, _ = tensors[name]
        begin, end = end, end + tensors[name].size * dtype.itemsize
        facts = {"dtype": DTYPES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
        header[name] = facts
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            _write_bytes(output, tensors[name].read())


def _write_bytes(output: Any, array: np.ndarray) -> None:
    # A file stores the elements in C order and little-endian.
    array = np.ascontiguousarray(array)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data: Any = array.reshape(-1).view(np.uint8)
    for start in range(0, len(data), _CHUNK):
        output.write(data[start : start + _CHUNK].data)
