"""Reading and writing files: JSON, checksums, and writes that either complete or leave nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.errors import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a new path beside ``path``; when the block ends without an error it takes the place of ``path``.

    What is written there may be a file or a directory. On an error ``path`` stays as it was. Raises OSError.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
        fresh = Path(beside) / "new"
        yield fresh
        if fresh.is_dir() and path.exists():
            path.rename(Path(beside) / "old")
        fresh.replace(path)


def write_all(
    folder: Path,
    contents: Mapping[str, str | Callable[[Path], Any]],
    before: Callable[[], None] = lambda: None,
) -> None:
    """Writes several files into ``folder``; none of them appears before all are written. Raises OSError.

    Args:
        folder: is created if it does not exist.
        contents: relative name -> its text, or a function that writes the path it is given. The files appear in this order.
        before: is called when every file is written and none has appeared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new.", dir=folder) as beside:
        for name, content in contents.items():
            fresh = Path(beside) / name
            fresh.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                fresh.write_text(content, encoding="utf-8")
            else:
                content(fresh)
        before()
        for name in contents:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(beside) / name).replace(folder / name)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file, whole or not at all. Raises OSError."""
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON with a line feed at the end, whole or not at all. Raises OSError."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in a file of a run's workdir. Raises UserError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"{path} is missing or damaged; remove the workdir and run the command again"
        ) from None


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
