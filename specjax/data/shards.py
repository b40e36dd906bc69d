"""Files that are there as a whole or not at all: shards of JSON records (array_record), and JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  (compiled)

from specjax.errors import UserError


def write(path: Path, records: Sequence[dict]) -> None:
    """Writes a shard; the same records give the same bytes. Raises OSError."""
    partial = path.with_suffix(".partial")
    # One record a group: any of them can be read by itself.
    try:
        writer = array_record_module.ArrayRecordWriter(os.fspath(partial), "group_size:1")
        for record in records:
            writer.write(json.dumps(record).encode())
        writer.close()
    except RuntimeError as error:  # the library's own
        raise OSError(" ".join(str(error).split())) from None
    os.replace(partial, path)


def read(path: Path) -> list[dict]:
    """The records of a shard, in order. Raises ValueError where it is damaged."""
    reader = array_record_module.ArrayRecordReader(os.fspath(path))
    try:
        return [json.loads(record) for record in reader.read_all()] if reader.num_records() else []
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    finally:
        with contextlib.suppress(RuntimeError):  # closing tells again what was wrong
            reader.close()


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """Raises UserError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"{path} is missing or damaged; remove the workdir and run the command again"
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Indented, with a line feed at the end."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
