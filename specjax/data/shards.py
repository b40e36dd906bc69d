"""Shards of JSON records in array_record files: a shard is on disk completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from array_record.python import (  # compiled
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from specjax import files


def write(path: Path, records: Sequence[dict]) -> None:
    """Writes a shard; the same records give the same bytes. Raises OSError."""
    with files.replacing(path) as fresh:
        # The library reports errors of the system as RuntimeError.
        try:
            # One record per group: each can be read alone.
            writer = array_record_module.ArrayRecordWriter(os.fspath(fresh), "group_size:1")
            for record in records:
                writer.write(json.dumps(record).encode())
            writer.close()
        except RuntimeError as error:
            raise OSError(" ".join(str(error).split())) from None


def read(path: Path) -> list[dict]:
    """The records of a shard, in order. Raises ValueError if it is damaged."""
    reader = array_record_module.ArrayRecordReader(os.fspath(path))
    try:
        return [json.loads(record) for record in reader.read_all()] if reader.num_records() else []
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    finally:
        with contextlib.suppress(RuntimeError):  # closing raises the same error again
            reader.close()
