"""The features of a target along a text, stored once and read at random: rows of one length.

A directory has array_record shards (one record per row, see ``feature_records``), how often each
token is a label, and ``manifest.json``, which is written last.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax import files
from specjax.data import feature_records, shards
from specjax.data.feature_records import RecordLayout
from specjax.errors import UserError
from specjax.types import Batch

FORMAT, SCHEMA = "specjax features", 1
BUILD = "configs/features.py"
COUNTS = "counts.npy"
# Shards that are open at the same time.
_OPEN = 32


class Store:
    """A finished directory of features."""

    def __init__(self, directory: str | os.PathLike):
        """Opens a directory, or the workdir of the run that wrote it.

        Raises UserError if it is missing, unfinished, damaged, or of another program or version.
        """
        folder = Path(directory).expanduser()
        inner = folder / "features"
        self.directory = inner if (inner / "manifest.json").is_file() else folder
        self.manifest = _manifest(self.directory)
        stored = self.manifest
        self.layout = RecordLayout(
            stored["length"],
            stored["width"],
            tuple(stored["taps"]),
            stored["dtype"],
            stored["documents"],
        )
        for name, facts in stored["shards"].items():
            path = self.directory / name
            if not path.is_file() or path.stat().st_size != facts["bytes"]:
                raise UserError(
                    f"{path} is missing or damaged; remove {self.directory} and store the "
                    f"features again with {BUILD}"
                )
        self._reader = functools.lru_cache(maxsize=_OPEN)(self._open)

    @property
    def counts(self) -> np.ndarray:
        """i64[n]: how often each token id is a label of the train split. Raises UserError."""
        path = self.directory / COUNTS
        try:
            return np.load(path)
        except (OSError, ValueError):
            raise UserError(
                f"{path} is missing or damaged; store the features again with {BUILD}"
            ) from None

    def size(self, split: str) -> int:
        """Number of rows of a split."""
        return self.manifest["rows"][split]

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
        """The rows with these numbers, with the taps at ``places``: ``feature_records.batch_of``.

        Raises UserError if a shard is damaged.
        """
        stored = self._records(split, numbers)
        return feature_records.batch_of(self.layout, stored, places)

    def _records(self, split: str, numbers: Sequence[int]) -> list[bytes]:
        size, by_shard = self.manifest["shard_rows"], {}
        for place, number in enumerate(numbers):
            by_shard.setdefault(number // size, []).append((place, number % size))
        found: list[bytes] = [b""] * len(numbers)
        for shard, wanted in by_shard.items():
            name = feature_records.name_of(split, shard, -(-self.size(split) // size))
            try:
                rows = self._reader(name).read([row for _, row in wanted])
            except ValueError as error:
                raise UserError(
                    f"{self.directory / name} is damaged ({error}); remove {self.directory} and "
                    f"store the features again with {BUILD}"
                ) from None
            for (place, _), row in zip(wanted, rows, strict=True):
                found[place] = row
        return found

    def _open(self, name: str) -> shards.Reader:
        return shards.Reader(self.directory / name)


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """Batches of stored rows, read from disk; a batch is a pure function of (seed, step).

    An epoch has every row of the train split once, in an order of its own. Raises UserError if
    there are fewer rows than one batch.
    """

    store: Store
    batch_size: int
    seed: int = 0
    places: tuple[int, ...] = ()  # of the taps in ``Features.taps``, as ``Store.chosen`` gives them

    def __post_init__(self):
        if self.store.size("train") < self.batch_size:
            raise UserError(
                f"{self.store.directory} has {self.store.size('train')} rows, fewer than one batch "
                f"of {self.batch_size}; lower config.train.batch_size"
            )

    def numbers(self, step: int) -> list[int]:
        """The rows of the batch of a step, which may cross the end of an epoch."""
        rows = self.store.size("train")
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [int(self._order(place // rows)[place % rows]) for place in places]

    def batch(self, step: int) -> Batch:
        """tokens i32[B,T+1], labelled and segments or None, and the features."""
        return self.store.read("train", self.numbers(step), self.places)

    def part(self, step: int, rows: Sequence[int]) -> Batch:
        """The same batch with these rows only: the others are not read."""
        numbers = self.numbers(step)
        return self.store.read("train", [numbers[row] for row in rows], self.places)

    @functools.cached_property
    def _order(self):
        return functools.lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.store.size("train"))


class HeldOut(Sequence):
    """The first ``count`` batches of the held-out rows, or as many as there are, read when used.

    Raises UserError if there are fewer rows than one batch.
    """

    def __init__(self, store: Store, batch_size: int, count: int, places: Sequence[int] = ()):
        rows = store.size("valid")
        if rows < batch_size:
            raise UserError(
                f"{store.directory} has {rows} held-out rows, fewer than one batch of "
                f"{batch_size}; lower config.train.batch_size, or store more of them"
            )
        self._store, self._size, self._places = store, batch_size, places
        self._count = min(count, rows // batch_size)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        number = range(self._count)[index]
        numbers = range(number * self._size, (number + 1) * self._size)
        return self._store.read("valid", numbers, self._places)

    def with_places(self, places: Sequence[int]) -> HeldOut:
        """The same batches with other taps."""
        return HeldOut(self._store, self._size, self._count, places)


def _manifest(folder: Path) -> dict:
    """The manifest, with the keys and types that are read here. Raises UserError."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        ours, version = manifest["format"] == FORMAT, manifest["schema"]
    except OSError:
        raise UserError(
            f"{folder} has no finished features; store them with {BUILD} (the same command "
            "resumes a killed run)"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is damaged, or of another program; store the features with {BUILD}"
        ) from None
    if not ours or version != SCHEMA:
        raise UserError(
            f"{path} is {manifest['format']!r}, version {version!r}; this specjax reads "
            f"{FORMAT!r}, version {SCHEMA}; store the features again with {BUILD}"
        )
    return manifest


def target_fingerprint(directory: str | os.PathLike) -> str:
    """SHA-256 over the weight files and config.json of a model directory, or of a .gguf file."""
    folder = Path(directory)
    if folder.is_file():
        return files.sha256(folder)
    paths = (folder / "config.json", *sorted(folder.glob("*.safetensors")))
    return hashlib.sha256("".join(map(files.sha256, paths)).encode()).hexdigest()
