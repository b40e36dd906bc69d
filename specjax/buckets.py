"""Files in buckets, such as gs://bucket/run, by ``fsspec``: copies in the user's cache folder.

Everything reads and writes the copies. Models and texts are fetched where they are named
(``local``). A workdir in a bucket is fetched before a run (``begin``), and what changed is sent
back when a checkpoint is complete and at the end, so that a run goes on on another machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specjax import files
from specjax.errors import UserError

_LIST = ".copied.json"  # in a copy: the files that it has in common with the bucket
# What a store says of a file; one of these changes with the file.
_FACTS = ("size", "etag", "ETag", "generation", "md5Hash", "mtime", "LastModified", "created")
_workdirs: dict[Path, str] = {}  # copy of a workdir -> its address


def is_address(name: str | os.PathLike) -> bool:
    """Whether it is an address: a scheme of two or more letters, "://" and a name."""
    return re.match(r"[a-z][a-z0-9]+://[^/]", os.fspath(name)) is not None


def local(name: str | os.PathLike) -> Path:
    """The path; of a file or folder in a bucket, an up-to-date copy. Raises UserError.

    Checkpoints, in a folder of that name, are left out.
    """
    if not is_address(text := os.fspath(name).rstrip("/")):
        return Path(name).expanduser()
    with _one_line(text):
        store, root = _store(text)
        if store.isfile(root):
            folder, _, last = text.rpartition("/")
            copy = copy_of(folder)
            _fetch(store, root.rpartition("/")[0], copy, lambda file: file == last)
            return copy / last
        copy = copy_of(text)
        if not _fetch(store, root, copy, lambda file: not file.startswith("checkpoints/")):
            raise FileNotFoundError(2, "no such file or folder")
        return copy


def begin(address: str) -> Path:
    """Fetches the whole workdir of a run; its copy, of which ``send`` knows. Raises UserError."""
    address = address.rstrip("/")
    with _one_line(address):
        _fetch(*_store(address), folder := copy_of(address), lambda file: True)
    _workdirs[folder] = address
    return folder


def end(folder: Path) -> str | None:
    """Sends what changed; the address, or None if nothing was written. Raises UserError."""
    try:
        send(folder)
    finally:
        address = _workdirs.pop(folder)
    return address if folder.is_dir() else None


def send(path: Path) -> None:
    """Sends what changed in the workdir that contains ``path``; nothing if it is in no bucket.

    Raises UserError.
    """
    folder = next((each for each in _workdirs if path.is_relative_to(each)), None)
    if folder is not None and folder.is_dir():
        with _one_line(_workdirs[folder]):
            _send(folder, *_store(_workdirs[folder]))


def copy_of(address: str) -> Path:
    """Where the copy of a folder in a bucket is."""
    address = address.rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    return files.cache_folder() / "buckets" / digest / address.rpartition("/")[2]


def _store(address: str) -> tuple[Any, str]:
    """The file system of fsspec, and the path in it."""
    import fsspec

    store, root = fsspec.url_to_fs(address)
    store.invalidate_cache()
    return store, root.rstrip("/")


@contextlib.contextmanager
def _one_line(address: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        text = f"{address} needs another package: {error}; gs:// is read with specjax[buckets]"
        raise UserError(text) from None
    except Exception as error:  # each store has errors of its own
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{address} cannot be read or written ({reason})") from error


def _fact(info: dict) -> str:
    return str([info[key] for key in _FACTS if key in info])


def _held(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> {"there", "here"}: what was known of both files when one was copied."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / _LIST).read_text())
    return {}


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _fetch(store: Any, root: str, folder: Path, wanted: Callable[[str], bool]) -> bool:
    """Copies what is new or changed in the bucket, and removes what is gone there.

    ``wanted`` gets the name of a file below ``root``. Returns whether there is such a file.
    """
    found = store.find(root, detail=True) if store.exists(root) else {}
    there = {path.removeprefix(f"{root}/"): info for path, info in found.items()}
    there = {name: _fact(info) for name, info in there.items() if wanted(name)}
    held = _held(folder)
    if not there and not held:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    for name in filter(wanted, held.keys() - there.keys()):
        (folder / name).unlink(missing_ok=True)
        del held[name]
    for name, fact in there.items():
        path = folder / name
        if held.get(name, {}).get("there") != fact or not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.replacing(path) as fresh:
                store.get_file(f"{root}/{name}", str(fresh))
            held[name] = {"there": fact, "here": _stamp(path)}
    files.write_json(folder / _LIST, held)
    return bool(there)


def _send(folder: Path, store: Any, root: str) -> None:
    """Sends what is new or changed here, and removes what is gone here.

    Checksums follow what they belong to, so that half a checkpoint is seen to be one.
    """
    held = _held(folder)
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    here = {name.as_posix(): _stamp(folder / name) for name in names if not _is_unfinished(name)}
    for name in held.keys() - here.keys():
        with contextlib.suppress(FileNotFoundError):
            store.rm_file(f"{root}/{name}")
        del held[name]
    for name in sorted(here, key=lambda name: (name.endswith("checksums.json"), name)):
        if held.get(name, {}).get("here") != here[name]:
            path = f"{root}/{name}"
            store.makedirs(path.rpartition("/")[0], exist_ok=True)
            store.put_file(str(folder / name), path)
            held[name] = {"there": _fact(store.info(path)), "here": here[name]}
    files.write_json(folder / _LIST, held)


def _is_unfinished(name: Path) -> bool:
    """Whether a file is being written, by Orbax or ``files.replacing``, or is the list of files."""
    return any("-tmp" in part or part.startswith(".") for part in name.parts)
