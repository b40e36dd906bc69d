"""Shards of records in array_record files: a shard is on disk completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from array_record.python import (  # compiled
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from specjax import files


def write(path: Path, records: Sequence[dict]) -> None:
    """Writes a shard of JSON records; the same ones give the same bytes. Raises OSError."""
    write_bytes(path, (json.dumps(record).encode() for record in records), "group_size:1")


def write_bytes(path: Path, records: Iterable[bytes], options: str) -> None:
    """Writes a shard; the options of array_record. Raises OSError."""
    with files.replacing(path) as fresh:
        # The library reports errors of the system as RuntimeError.
        try:
            # One record per group: each can be read alone.
            writer = array_record_module.ArrayRecordWriter(os.fspath(fresh), options)
            for record in records:
                writer.write(record)
            writer.close()
        except RuntimeError as error:
            raise OSError(" ".join(str(error).split())) from None


def read(path: Path) -> list[dict]:
    """The JSON records of a shard, in order. Raises ValueError if it is damaged."""
    with Reader(path) as reader:
        return [json.loads(record) for record in reader.read()]


class Reader:
    """An open shard. Raises ValueError if it is damaged, here and where it is read."""

    def __init__(self, path: Path):
        self._reader = array_record_module.ArrayRecordReader(os.fspath(path))

    @property
    def count(self) -> int:
        """The number of records."""
        with _damaged():
            return self._reader.num_records()

    def read(self, numbers: Sequence[int] | None = None) -> list[bytes]:
        """The records with these numbers; None: all."""
        with _damaged():
            # The library does not read a shard without records.
            if not self._reader.num_records():
                return []
            return self._reader.read_all() if numbers is None else self._reader.read(list(numbers))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(RuntimeError):  # closing raises an error of reading again
            self._reader.close()


@contextlib.contextmanager
def _damaged() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ValueError(str(error)) from None
