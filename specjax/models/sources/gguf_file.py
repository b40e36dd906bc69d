"""Opens .gguf files: their metadata, and the place and type of every tensor.

The ``gguf`` library of llama.cpp parses the file (github.com/ggml-org/ggml, docs/gguf.md). Its
reader keeps a small array for every token, so it is dropped as soon as the facts are copied.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UserError, library, on_disk

PLAIN = ("F32", "F16", "BF16")  # types that lose nothing


class Stored(NamedTuple):
    """A tensor of the file. Rows are along the first axis; a row has ``row_bytes`` bytes."""

    shape: tuple[int, ...]  # as in a Hugging Face style directory: [out, in]
    kind: str  # "F32", "Q4_1", ...
    offset: int  # in the file, bytes
    row_bytes: int


class GgufFile(NamedTuple):
    """What a .gguf file holds, without its weights."""

    path: Path
    fields: dict[str, Any]  # metadata
    tensors: dict[str, Stored]

    @property
    def architecture(self) -> str:
        """``general.architecture``: the family in llama.cpp's words."""
        return str(self.fields.get("general.architecture"))

    def quantised(self) -> tuple[str, ...]:
        """The types of the tensors that were rounded when the file was made, most bytes first."""
        sizes = collections.Counter[str]()
        for stored in self.tensors.values():
            if stored.kind not in PLAIN:
                sizes[stored.kind] += stored.shape[0] * stored.row_bytes
        return tuple(kind for kind, _ in sizes.most_common())


def is_gguf(path: Path) -> bool:
    """Whether a path names a .gguf file, which may not exist."""
    return path.suffix.lower() == ".gguf"


def read(path: Path) -> GgufFile:
    """The facts of a .gguf file; the latest ones are kept in memory.

    Raises UserError without the ``gguf`` library, and for a file that is missing, foreign, damaged,
    a part of several files, or big-endian.
    """
    with on_disk(f"{path} cannot be read", "give a readable file"):
        stat = path.stat()
        return _read(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read(path: Path, size: int, changed: int) -> GgufFile:
    gguf = _library(path)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UserError(f"{path} is not a .gguf file: it does not begin with GGUF")
    # The library checks little: a damaged file can raise any error.
    with on_disk(f"{path} is damaged or incomplete", "copy it again", Exception):
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: _stored(tensor) for tensor in reader.tensors}
        big_endian = reader.endianess == gguf.GGUFEndian.BIG
    if big_endian:
        raise UserError(f"{path} is a big-endian .gguf file; give a little-endian one")
    if (parts := fields.get("split.count", 1)) > 1:
        raise UserError(
            f"{path} is one of {parts} parts of a model; join them with llama.cpp's "
            "llama-gguf-split --merge"
        )
    if any(t.offset + t.shape[0] * t.row_bytes > size for t in tensors.values()):
        raise UserError(f"{path} is incomplete: it has {size} bytes; copy it again")
    return GgufFile(path, fields, tensors)


def _stored(tensor: Any) -> Stored:
    # The library gives the extents in the order of ggml, the row first.
    shape = tuple(int(extent) for extent in reversed(tensor.shape.tolist()))
    row_bytes = int(tensor.n_bytes) // max(shape[0] if shape else 1, 1)
    return Stored(shape, tensor.tensor_type.name, int(tensor.data_offset), row_bytes)


def dequantiser(path: Path, kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function from the bytes u8[rows, row_bytes] of a type to f32[rows, columns].

    Raises UserError for a type that the ``gguf`` library cannot read.
    """
    gguf = _library(path)
    from gguf import quants

    quantised = gguf.GGMLQuantizationType[kind]
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[quantised][1]), np.uint8)
    try:
        quants.dequantize(block, quantised)
    except NotImplementedError:
        raise UserError(
            f"{path} has tensors of type {kind}, which the gguf library cannot read; "
            "give a file with another quantisation"
        ) from None
    return lambda data: quants.dequantize(data, quantised)


def _library(path: Path) -> Any:
    """The gguf library. Raises UserError if it is not installed."""
    problem = f"{path} is a .gguf file, and the gguf library is not installed"
    return library("gguf", "gguf", problem)
