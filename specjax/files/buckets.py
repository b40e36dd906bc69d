"""Files in buckets, such as gs://bucket/run, by ``fsspec``: copies in the user's cache folder.

Everything reads and writes the copies; hidden files are left alone. Models and texts are fetched
where they are named (``local``). A workdir in a bucket is fetched before a run (``begin``), and
what changed is sent back when a checkpoint is complete and at the end, so that a run goes on on
another machine.
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
SCHEMES = ("gs", "gcs", "s3", "s3a", "az", "abfs", "memory")  # stores, of those that fsspec knows
# What a store says of a file; one of these changes with the file.
_FACTS = ("size", "etag", "ETag", "generation", "md5Hash", "mtime", "LastModified", "created")
_workdirs: dict[Path, str] = {}  # copy of a workdir -> its address


def is_address(name: str | os.PathLike) -> bool:
    """Whether it is an address: one of ``SCHEMES``, "://" and a name."""
    return re.match(rf"({'|'.join(SCHEMES)})://[^/]", os.fspath(name)) is not None


def addressed(value: Any) -> Any:
    """Plain JSON in which paths in the copy of a workdir are addresses: the same everywhere."""
    if isinstance(value, dict):
        return {key: addressed(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(addressed, value))
    if isinstance(value, str):
        for folder, address in _workdirs.items():
            value = value.replace(str(folder), address)
    return value


def local(name: str | os.PathLike) -> Path:
    """The path; of a file or folder in a bucket, an up-to-date copy. Raises UserError.

    Checkpoints, in a folder of that name, are left out.
    """
    if "\0" in (text := os.fspath(name).rstrip("/")):
        raise UserError(f"{text!r} is no path: it has a null character")
    if not is_address(text):
        return Path(name).expanduser()
    with _one_line(text):
        store, root = _store(text)
        if store.isfile(root):
            folder, _, last = text.rpartition("/")
            there, copy = {last: _fact(store.info(root))}, copy_of(folder)
            _fetch(store, root.rpartition("/")[0], there, copy, lambda name: name == last)
            return copy / last
        if (copy := copy_of(text)) in _workdirs:
            return copy
        there = {name: x for name, x in _listed(store, root).items() if _is_small(name)}
        if not there:
            raise FileNotFoundError(2, "no such file or folder")
        _fetch(store, root, there, copy, _is_small)
        return copy


def begin(address: str) -> Path:
    """Fetches the whole workdir of a run; its copy, of which ``send`` knows. Raises UserError."""
    address = address.rstrip("/")
    with _one_line(address):
        store, root = _store(address)
        _fetch(store, root, _listed(store, root), folder := copy_of(address), lambda name: True)
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
    except UserError:
        raise
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


def _stamp(path: Path) -> list[int] | None:
    with contextlib.suppress(FileNotFoundError):
        stat = path.stat()
        return [stat.st_size, stat.st_mtime_ns]
    return None


def _listed(store: Any, root: str) -> dict[str, str]:
    """Name below a folder of the bucket -> what the store says of the file."""
    found = store.find(root, detail=True) if store.exists(root) else {}
    there = {path.removeprefix(f"{root}/"): _fact(info) for path, info in found.items()}
    for name in there:
        if name.startswith("/") or ".." in name.split("/"):
            raise UserError(f"{root} has a file {name!r}, which is no name in a folder; rename it")
    return {name: fact for name, fact in there.items() if not _is_unfinished(name)}


def _fetch(
    store: Any, root: str, there: dict[str, str], folder: Path, asked: Callable[[str], bool]
) -> None:
    """Copies the files ``there`` that are new or changed, there or here.

    Removes a file that the bucket had and has no more, if its name is ``asked`` for.
    """
    held = _held(folder)
    if not there and not held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in filter(asked, held.keys() - there.keys()):
            (folder / name).unlink(missing_ok=True)
            del held[name]
        for name, fact in there.items():
            path = folder / name
            if held.get(name) != {"there": fact, "here": _stamp(path)}:
                path.parent.mkdir(parents=True, exist_ok=True)
                with files.replacing(path) as fresh:
                    store.get_file(f"{root}/{name}", str(fresh))
                held[name] = {"there": fact, "here": _stamp(path)}
    finally:
        files.write_json(folder / _LIST, held)


def _send(folder: Path, store: Any, root: str) -> None:
    """Sends what is new or changed here, and removes what is gone here.

    Checksums follow what they belong to, so that half a checkpoint is seen to be one.
    """
    held, here = _held(folder), {}
    for inner, _, names in os.walk(folder):
        for name in (os.path.relpath(os.path.join(inner, name), folder) for name in names):
            # None: it has been removed since.
            if not _is_unfinished(name) and (stamp := _stamp(folder / name)) is not None:
                here[name] = stamp
    try:
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
    finally:
        files.write_json(folder / _LIST, held)


def _is_small(name: str) -> bool:
    """Whether a file is not of a checkpoint."""
    return not name.startswith("checkpoints/")


def _is_unfinished(name: str) -> bool:
    """Whether a file is being written, by Orbax or ``files.replacing``, or is hidden."""
    return any(".orbax-checkpoint-tmp" in part or part.startswith(".") for part in name.split("/"))
