"""Reads single tensors of safetensors files with little memory.

The safetensors library maps a file into memory and copies a tensor out of it. The pages that were
read stay resident as long as the file is open, so a loaded model would count twice. Here a file is
opened for some rows at a time, which are converted into the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

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

    def get_tensor(self, name: str, dtype: Any = None) -> np.ndarray:
        """A tensor as ``dtype``; None: as it is stored."""
        shape = self._opened.get_slice(name).get_shape()
        if not shape or not shape[0]:
            return np.array(self._opened.get_tensor(name), dtype)
        result = None
        for begin, end in chunks(shape, 4):
            with safe_open(str(self._path), framework="np") as file:
                rows = file.get_slice(name)[begin:end]
            if result is None:
                result = np.empty(shape, dtype or rows.dtype)
            result[begin:end] = rows
        assert result is not None
        return result


def chunks(shape: Sequence[int], item: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of the rows that are read at once, for ``item`` bytes per element."""
    row = max(int(np.prod(shape[1:], dtype=np.int64)) * item, 1)
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
