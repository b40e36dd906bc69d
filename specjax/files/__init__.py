"""Reading and writing files: JSON, checksums, and writes that complete or change no file.

And what a file of measurements says about the host.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.errors import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path; when the block ends without an error, it replaces ``path``.

    The block writes a file or a directory there. On an error ``path`` is not changed. Raises
    OSError.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
        fresh = Path(temporary) / "new"
        yield fresh
        old = Path(temporary) / "old"
        if fresh.is_dir() and path.exists():
            path.rename(old)
        try:
            fresh.replace(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise


def write_all(
    folder: Path,
    contents: Mapping[str, str | Callable[[Path], Any]],
    before: Callable[[], None] = lambda: None,
) -> None:
    """Writes several files into ``folder``; none of them appears before all are written.

    Args:
        folder: is created if it does not exist.
        contents: relative name -> its text, or a function that writes the file at a given path. The
            files appear in this order.
        before: is called when every file is written and none has appeared.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new.", dir=folder) as temporary:
        for name, content in contents.items():
            fresh = Path(temporary) / name
            fresh.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                fresh.write_text(content, encoding="utf-8")
            else:
                content(fresh)
        before()
        for name in contents:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(temporary) / name).replace(folder / name)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file completely or not at all. Raises OSError."""
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON with a final newline, completely or not at all. Raises OSError."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def parsed(text: str) -> Any:
    """The JSON value of a user's text. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """The JSON value in a file of a run's workdir. Raises UserError."""
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"{path} is missing or damaged; remove the workdir and run the command again"
        ) from None


def read_manifest(path: Path, name: str, schema: int, build: str) -> dict:
    """The manifest of the data ``name``, with its keys "format" and "schema".

    ``build`` is the command that makes the data. Raises UserError: a missing or damaged file, one
    of another program or format version.
    """
    what = name.replace("_", " ")
    try:
        manifest = parsed(path.read_text(encoding="utf-8"))
        form, version = manifest["format"], manifest["schema"]
    except OSError:
        problem = f"{path.parent} has no {path.name}; build the {what}"
    except (ValueError, KeyError, TypeError):
        problem = f"{path} is damaged, or no {what} of specjax; build it"
    else:
        if (form, version) == (f"specjax {name}", schema):
            return manifest
        problem = f"{path} is no {what} of specjax; build one"
        if form == f"specjax {name}":
            versions = f"format version {version!r}, but this specjax reads version {schema}"
            problem = f"{path} has {versions}; build it again"
    raise UserError(f"{problem} with {build}")


def cache_folder() -> Path:
    """Where this user's files of specjax are: $SPECJAX_CACHE, or specjax in the cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("SPECJAX_CACHE") or Path(home) / "specjax")


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


WHOLE, FIRST, PIECE, PIECES = 1 << 24, 1 << 20, 1 << 12, 256  # of ``fingerprint``, bytes


def fingerprint(path: Path) -> str:
    """A hash of a file's content that costs little, in hexadecimal.

    Of a file of at most 16 MiB it is that of all bytes. Of a larger one it is that of its size, of
    the first MiB, which has the header of a file of weights, and of 256 pieces of 4 KiB at equal
    distances, up to the end: a change between them that keeps the size is not seen. Raises OSError.
    """
    size = path.stat().st_size
    if size <= WHOLE:
        return sha256(path)
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        digest.update(file.read(FIRST))
        for number in range(1, PIECES + 1):
            file.seek((size - PIECE) * number // PIECES)
            digest.update(file.read(PIECE))
    return digest.hexdigest()


def machine() -> dict:
    """The host: its processor as named in /proc/cpuinfo, and the cores this process may use."""
    name = None
    with contextlib.suppress(OSError):
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = re.search(r"^model name\s*: *(.*\S)", facts, re.MULTILINE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": name[1] if name else platform.processor() or "unknown", "cores": cores}
