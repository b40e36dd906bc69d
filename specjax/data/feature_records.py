"""Rows of features as bytes: tokens, labels, segments, hidden states and taps in one record.

Features are float32, bfloat16, or float8 (e4m3) with one float32 scale per vector, which maps the
largest entry of the vector to the largest float8.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax.data import shards
from specjax.types import Batch, Features

# Name -> (the dtype in memory, the dtype with the same bits in a record).
DTYPES: dict[str, tuple[Any, str]] = {
    "float32": (np.float32, "<f4"),
    "bfloat16": (ml_dtypes.bfloat16, "<u2"),
    "float8": (ml_dtypes.float8_e4m3fn, "u1"),
}
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


class RecordLayout(NamedTuple):
    """What a record has."""

    length: int  # T; a row has one token more
    width: int  # E
    taps: tuple[int, ...]  # layers whose outputs are stored, in addition to ``Output.hidden``
    dtype: str  # one of DTYPES
    documents: bool  # whether rows have labels and segments; otherwise every token is a label

    @property
    def bytes_per_token(self) -> int:
        """Size of the features of one token."""
        scale = 4 if self.dtype == "float8" else 0
        each = self.width * np.dtype(DTYPES[self.dtype][1]).itemsize + scale
        return (1 + len(self.taps)) * each

    @property
    def record(self) -> np.dtype:
        """The fields of a record."""
        row, vectors = (self.length + 1,), (1 + len(self.taps), self.length)
        fields: list[Any] = [("tokens", "<i4", row)]
        if self.documents:
            fields += [("labelled", "?", row), ("segments", "<i4", row)]
        fields.append(("values", DTYPES[self.dtype][1], (*vectors, self.width)))
        if self.dtype == "float8":
            fields.append(("scales", "<f4", vectors))
        return np.dtype(fields)


def in_bits(values: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array | None]:
    """[...,E] in a dtype of DTYPES as unsigned integers (float32 unchanged), and scales f32[...].

    Scales are None except for float8.
    """
    values = values.astype(jnp.float32)
    if dtype == "float32":
        return values, None
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16), None
    largest = jnp.abs(values).max(-1)
    scales = jnp.where(largest > 0, largest / _LARGEST, 1)
    scaled = jnp.clip(values / scales[..., None], -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(scaled, jnp.uint8), scales


def records(
    layout: RecordLayout, batch: Batch, values: np.ndarray, scales: np.ndarray | None
) -> list[bytes]:
    """One record per row of a batch; ``values`` [B,1+taps,T,E] and ``scales`` as of ``in_bits``."""
    table = np.zeros(len(batch.tokens), layout.record)
    table["tokens"], table["values"] = batch.tokens, values
    if layout.documents:
        table["labelled"], table["segments"] = batch.labelled, batch.segments
    if scales is not None:
        table["scales"] = scales
    return [row.tobytes() for row in table]


def batch_of(layout: RecordLayout, stored: Sequence[bytes], places: Sequence[int]) -> Batch:
    """The batch of these records, with the taps at ``places``.

    All NumPy; features that are stored as float8 are bfloat16 on the default device.
    """
    table = [np.frombuffer(record, layout.record)[0] for record in stored]

    def column(name: str) -> Any:
        return np.stack([row[name] for row in table])

    def features(place: int) -> Any:
        values = np.stack([row["values"][place] for row in table])
        if layout.dtype != "float8":
            return values.view(DTYPES[layout.dtype][0])
        return _from_eight_bits(values, np.stack([row["scales"][place] for row in table]))

    labelled, segments = map(column, ("labelled", "segments")) if layout.documents else (None, None)
    taps = tuple(features(1 + place) for place in places)
    return Batch(column("tokens"), labelled, segments, Features(features(0), taps))


@jax.jit
def _from_eight_bits(values: jax.Array, scales: jax.Array) -> jax.Array:
    """u8[B,T,E], f32[B,T] -> bfloat16. On the device: NumPy needs ten times the time."""
    numbers = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)
    return (numbers * scales[..., None]).astype(jnp.bfloat16)


def name_of(split: str, number: int, count: int) -> str:
    """The file name of a shard."""
    return f"{split}-{number:05}-of-{count:05}.array_record"


def is_finished(path: Path, layout: RecordLayout, rows: Sequence[Batch]) -> bool:
    """Whether a shard has these rows; the first and the last are compared."""
    if not path.is_file():
        return False
    try:
        with shards.Reader(path) as reader:
            ends = reader.read([0, len(rows) - 1]) if reader.count == len(rows) else []
    except ValueError:
        return False
    size = layout.record.itemsize
    return bool(ends) and all(
        len(record) == size
        and np.array_equal(np.frombuffer(record, layout.record)[0]["tokens"], row.tokens[0])
        for record, row in zip(ends, (rows[0], rows[-1]), strict=True)
    )


def write(path: Path, rows: Sequence[bytes]) -> None:
    """Writes a shard, without compression: features hardly become smaller. Raises OSError."""
    shards.write_bytes(path, rows, "group_size:1,uncompressed")
