"""Reads single tensors of safetensors files with little memory.

The safetensors library maps a file into memory and copies a tensor out of it. The pages that were
read stay resident as long as the file is open, so a loaded model would count twice. Here a file is
opened for some rows at a time, which are converted into the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from specjax import files
from specjax.errors import UserError
from specjax.models.hf_config import read_json

CHUNK = 1 << 22  # bytes of a tensor, as float32, that are converted at once


class Safetensors:
    """An open safetensors file whose tensors are read some rows at a time."""

    def __init__(self, path: Path, opened: Any):
        self._path, self._opened = path, opened

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._opened.keys())

    def shape_of(self, name: str) -> tuple[list[int], str]:
        """The shape and the type of a tensor, in the words of safetensors; nothing is read."""
        stored = self._opened.get_slice(name)
        return stored.get_shape(), stored.get_dtype()

    def get_tensor(
        self, name: str, dtype: Any = None, values: Callable[..., np.ndarray] | None = None
    ) -> np.ndarray:
        """A tensor as ``dtype``; None: as it is stored.

        ``values`` makes, of some rows and the number of the first one, what they stand for.
        """
        shape, stored = self.shape_of(name)
        if not shape or not shape[0]:
            return np.array(self._opened.get_tensor(name), dtype)
        result = None
        for begin, end in chunks(shape):
            rows = self._rows(name, stored, begin, end)
            rows = rows if values is None else values(rows, begin)
            if result is None:
                result = np.empty((shape[0], *rows.shape[1:]), dtype or rows.dtype)
            result[begin:end] = rows
        assert result is not None
        return result

    def _rows(self, name: str, stored: str, begin: int, end: int) -> np.ndarray:
        if stored != "F8_E4M3":  # which the library does not give as a NumPy array
            with safe_open(str(self._path), framework="np") as file:
                return file.get_slice(name)[begin:end]
        with open(self._path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            facts = files.parsed(file.read(size).decode())[name]
            row = int(np.prod(facts["shape"][1:], dtype=np.int64))
            file.seek(8 + size + facts["data_offsets"][0] + begin * row)
            data = np.frombuffer(file.read((end - begin) * row), np.uint8)
        return data.view(jnp.float8_e4m3fn).reshape(end - begin, *facts["shape"][1:])


def chunks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[begin, end) of the rows that are read at once: at most ``CHUNK`` bytes, or one row."""
    row = max(4 * int(np.prod(shape[1:], dtype=np.int64)), 1)
    step = max(CHUNK // row, 1)
    for begin in range(0, shape[0], step):
        yield begin, min(begin + step, shape[0])


def shard_names(index: Path) -> list[str]:
    """The files that a model.safetensors.index.json names, sorted.

    Raises UserError for one that is damaged, or names a file outside of its directory.
    """
    names = read_json(index).get("weight_map") or {}
    named = list(names.values()) if isinstance(names, dict) else [names]
    for name in named:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise UserError(
                f"{index} names {name!r}; its weight_map must name .safetensors files beside it"
            )
    return sorted(set(named))
