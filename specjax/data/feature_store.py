"""The features of a target along a text, stored once and read at random: rows of one length.

A directory has array_record shards (one record per row, see ``RecordLayout``), how often each
token is a label, and ``manifest.json``, which is written last. Features are float32, bfloat16, or
float8 (e4m3) with one float32 scale per vector, which maps the largest entry of the vector to the
largest float8.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax import files
from specjax.data import packing, shards
from specjax.errors import UserError
from specjax.files import buckets
from specjax.types import Batch, Features

NAME, SCHEMA = "features", 1
BUILD = "configs/features.py"
COUNTS = "counts.npy"
# Shards that are open at the same time.
_OPEN = 32


class FeatureStore:
    """Finished features: a directory, or several whose rows follow each other."""

    def __init__(self, directory: str | os.PathLike, *others: str | os.PathLike):
        """Opens directories, or the workdirs of the runs that wrote them.

        Raises UserError if one is missing, unfinished, damaged, or of another program or version,
        and if the others have another target, or rows of another kind.
        """
        folder = buckets.local(directory)
        inner = folder / "features"
        self.directory = inner if (inner / "manifest.json").is_file() else folder
        build = f"{BUILD} (the same command resumes a killed run)"
        self.manifest = files.read_manifest(self.directory / "manifest.json", NAME, SCHEMA, build)
        # Version 1 of an earlier release has no teacher.
        stored: dict[str, Any] = {"teacher": False} | self.manifest
        layout = RecordLayout(*(stored[name] for name in RecordLayout._fields))
        self.layout = layout._replace(taps=tuple(layout.taps))
        for name, facts in stored["shards"].items():
            path = self.directory / name
            if not path.is_file() or path.stat().st_size != facts["bytes"]:
                raise UserError(
                    f"{path} is missing or damaged; remove {self.directory} and store the "
                    f"features again with {BUILD}"
                )
        self._reader = functools.lru_cache(maxsize=_OPEN)(shards.Reader)
        self._parts = (self, *map(FeatureStore, others))
        for part in self._parts[1:]:
            same = part.manifest["target"]["sha256"] == stored["target"]["sha256"]
            if part.layout != self.layout or not same:
                raise UserError(
                    f"{self.directory} and {part.directory} have other targets, layers, dtypes or "
                    f"lengths; store both with the same keys of {BUILD}, but for the text"
                )

    @property
    def digest(self) -> str:
        """16 hex digits that other features do not have."""
        sums = [files.sha256(part.directory / "manifest.json") for part in self._parts]
        return (hashlib.sha256("".join(sums).encode()).hexdigest() if sums[1:] else sums[0])[:16]

    @property
    def counts(self) -> np.ndarray:
        """i64[n]: how often each token id is a label of the train split. Raises UserError."""
        return np.sum([part._own_counts() for part in self._parts], axis=0)

    def _own_counts(self) -> np.ndarray:
        path = self.directory / COUNTS
        try:
            return np.load(path)
        except (OSError, ValueError):
            raise UserError(
                f"{path} is missing or damaged; store the features again with {BUILD}"
            ) from None

    def size(self, split: str) -> int:
        """Number of rows of a split."""
        return sum(part.manifest["rows"][split] for part in self._parts)

    def check_batch(self, split: str, rows: str, batch_size: int, or_else: str = "") -> None:
        """Raises UserError if there are fewer ``rows`` in a split than in one batch."""
        if self.size(split) < batch_size:
            raise UserError(
                f"{self.directory} has {self.size(split)} {rows}, fewer than one batch of "
                f"{batch_size}; lower config.train.batch_size{or_else}"
            )

    def chosen(self, taps: Sequence[int]) -> tuple[int, ...]:
        """The places of these layers among the stored taps. Raises UserError if one is missing."""
        missing = [layer for layer in taps if layer not in self.layout.taps]
        if missing:
            known = f"the taps {list(self.layout.taps)}" if self.layout.taps else "no taps"
            raise UserError(
                f"the drafter reads the target's layers {list(taps)}, and {self.directory} has "
                f"{known}; store the features with config.features.taps={','.join(map(str, taps))}"
            )
        return tuple(self.layout.taps.index(layer) for layer in taps)

    def read(self, split: str, numbers: Sequence[int], places: Sequence[int] = ()) -> Batch:
        """The rows with these numbers, with the taps at ``places``: ``batch_of``.

        Raises UserError if a shard is damaged.
        """
        return batch_of(self.layout, self._records(split, numbers), places)

    def _records(self, split: str, numbers: Sequence[int]) -> list[bytes]:
        """One read of each file. Raises UserError if one is damaged."""
        ends = np.cumsum([0, *(part.manifest["rows"][split] for part in self._parts)])
        by_file: dict[tuple[FeatureStore, str], list[tuple[int, int]]] = {}
        for place, number in enumerate(numbers):
            index = int(np.searchsorted(ends, number, "right")) - 1
            part = self._parts[index]
            size, rows = part.manifest["shard_rows"], part.manifest["rows"][split]
            shard, row = divmod(int(number - ends[index]), size)
            name = name_of(split, shard, -(-rows // size))
            by_file.setdefault((part, name), []).append((place, row))
        found: list[bytes] = [b""] * len(numbers)
        for (part, name), wanted in by_file.items():
            try:
                stored = part._reader(part.directory / name).read([row for _, row in wanted])
            except ValueError as error:
                raise UserError(
                    f"{part.directory / name} is damaged ({error}); remove {part.directory} and "
                    f"store the features again with {BUILD}"
                ) from None
            for (place, _), record in zip(wanted, stored, strict=True):
                found[place] = record
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """Batches of stored rows, read from disk; a batch is a pure function of (seed, step).

    An epoch has every row of the train split once, in an order of its own. Raises UserError if
    there are fewer rows than one batch.
    """

    store: FeatureStore
    batch_size: int
    seed: int = 0
    # Of the taps in ``Features.taps``, as ``FeatureStore.chosen`` gives them.
    places: tuple[int, ...] = ()

    def __post_init__(self):
        self.store.check_batch("train", "rows", self.batch_size)

    def numbers(self, step: int) -> list[int]:
        """The rows of the batch of a step, which may cross the end of an epoch."""
        return packing.numbers(self.seed, step, self.batch_size, self.store.size("train"))

    def batch(self, step: int) -> Batch:
        """tokens i32[B,T+1], labelled and segments or None, and the features."""
        return self.store.read("train", self.numbers(step), self.places)

    def part(self, step: int, rows: Sequence[int]) -> Batch:
        """The same batch with these rows only: the others are not read."""
        numbers = self.numbers(step)
        return self.store.read("train", [numbers[row] for row in rows], self.places)


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOut(Sequence):
    """The first ``most`` batches of the held-out rows, or as many as there are, read when used.

    Raises UserError if there are fewer rows than one batch.
    """

    store: FeatureStore
    batch_size: int
    most: int
    places: tuple[int, ...] = ()  # as of ``Stored``

    def __post_init__(self):
        self.store.check_batch("valid", "held-out rows", self.batch_size, ", or store more of them")

    def __len__(self) -> int:
        return min(self.most, self.store.size("valid") // self.batch_size)

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        numbers = range(number * self.batch_size, (number + 1) * self.batch_size)
        return self.store.read("valid", numbers, self.places)


def target_fingerprint(directory: str | os.PathLike) -> str:
    """SHA-256 over the weight files and config.json of a model directory, or of a .gguf file."""
    folder = Path(directory)
    if folder.is_file():
        return files.sha256(folder)
    paths = (folder / "config.json", *sorted(folder.glob("*.safetensors")))
    return hashlib.sha256("".join(map(files.sha256, paths)).encode()).hexdigest()


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
    teacher: bool = False  # whether rows have ``Features.total`` and ``Features.best``

    @property
    def bytes_per_token(self) -> int:
        """Size of the features of one token."""
        scale = 4 if self.dtype == "float8" else 0
        each = self.width * np.dtype(DTYPES[self.dtype][1]).itemsize + scale
        return (1 + len(self.taps)) * each + 8 * self.teacher

    @property
    def record(self) -> np.dtype:
        """The fields of a record."""
        row, vectors = (self.length + 1,), (1 + len(self.taps), self.length)
        fields: list[Any] = [("tokens", "<i4", row)]
        if self.documents:
            fields += [("labelled", "?", row), ("segments", "<i4", row)]
        if self.teacher:
            fields += [("total", "<f4", self.length), ("best", "<i4", self.length)]
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
    layout: RecordLayout,
    batch: Batch,
    values: np.ndarray,
    scales: np.ndarray | None,
    total: np.ndarray | None = None,
    best: np.ndarray | None = None,
) -> list[bytes]:
    """One record per row of a batch; ``values`` [B,1+taps,T,E] and ``scales`` as of ``in_bits``.

    ``total`` and ``best`` [B,T] are those of ``Features``.
    """
    table = np.zeros(len(batch.tokens), layout.record)
    fields = vars(batch) | {"values": values, "scales": scales, "total": total, "best": best}
    for name in layout.record.names or ():
        table[name] = fields[name]
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
    teacher = map(column, ("total", "best")) if layout.teacher else ()
    return Batch(column("tokens"), labelled, segments, Features(features(0), taps, *teacher))


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
    return bool(ends) and all(
        len(record) == layout.record.itemsize
        and np.array_equal(np.frombuffer(record, layout.record)[0]["tokens"], row.tokens[0])
        for record, row in zip(ends, (rows[0], rows[-1]), strict=True)
    )


def write(path: Path, rows: Sequence[bytes]) -> None:
    """Writes a shard, without compression: features hardly become smaller. Raises OSError."""
    shards.write_bytes(path, rows, "group_size:1,uncompressed")
