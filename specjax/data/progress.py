"""The batches that a bench has measured, on disk: a bench that was killed continues from them.

The first line of the file holds a fingerprint of what is measured; each further line is one batch,
written as soon as it is finished. With another configuration, other prompts or changed model files
the fingerprint differs, and the bench starts from the beginning. The file is removed when the
results are written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from specjax import __version__, files
from specjax.data import jsonl
from specjax.errors import UserError, on_disk
from specjax.files import buckets

NAME = "unfinished.jsonl"
PACKAGE = Path(__file__).parents[1]  # specjax/


def fingerprint(settings: dict, prompts: Sequence[Sequence[int]]) -> str:
    """A hash of everything that a measured batch depends on.

    That is the settings, the prompts, the machine and its versions, the source files of specjax,
    and the files that the settings name (``named_files``).

    Args:
        settings: the configuration, as plain JSON data.
        prompts: token ids.
    """
    versions = [__version__, jax.__version__, jax.default_backend(), jax.devices()[0].device_kind]
    names = ("jax_enable_x64", "jax_default_matmul_precision")
    flags = [*(str(getattr(jax.config, name)) for name in names), os.environ.get("XLA_FLAGS", "")]
    sources = [(str(path), files.sha256(path)) for path in sorted(PACKAGE.rglob("*.py"))]
    ids = [list(map(int, p)) for p in prompts]
    parts = [files.machine(), versions, flags, sources, settings, named_files(settings), ids]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def inputs(settings: dict) -> str:
    """A hash of the settings and of the content of the files that they name."""
    parts = [settings, named_files(settings)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def named_files(value: Any) -> list:
    """(path, ``files.fingerprint``) of the files in the settings, and of those in directories."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [stamp for each in inner for stamp in named_files(each)]
    if not isinstance(value, str):
        return []
    # Also the files of a list, and one behind a name or a key: "gsm8k:FILE", "ltd:profile=FILE".
    parts = [part.strip() for part in (value, *re.split("[,;]", value))]
    ends = [end for part in parts for end in (part, part.partition(":")[2], part.split("=")[-1])]
    return [stamp for each in dict.fromkeys(ends) if each for stamp in _stamps(each)]


def _stamps(name: str) -> list[tuple[str, str]]:
    """``named_files`` of one name."""
    try:
        path = buckets.local(name)
        if not path.exists():
            return []
        paths = [path] if path.is_file() else [*path.glob("*"), *path.glob("model/*")]
        return sorted((str(each), files.fingerprint(each)) for each in paths if each.is_file())
    except (OSError, RuntimeError, UserError):  # a text that is not a path
        return []


class Progress:
    """The measured batches, each under a name.

    Args:
        workdir: the directory of the file; None keeps them in memory only.
        mark: ``fingerprint`` of what is measured. A file with another mark is ignored, and
            replaced when the first one is stored.
    """

    def __init__(self, workdir: Path | None = None, mark: str = ""):
        self._path = None if workdir is None else workdir / NAME
        self._done: dict[str, Any] = {}
        if self._path is None:
            return
        self._mark, self._started = {"fingerprint": mark}, False
        lines = _lines(self._path)
        if lines and lines[0] == self._mark:
            batches = (line for line in lines[1:] if {"name", "value"} <= set(line))
            self._done = {line["name"]: line["value"] for line in batches}

    def _start(self, path: Path) -> None:
        """Writes the file again, without the incomplete line that may be at its end."""
        path.parent.mkdir(parents=True, exist_ok=True)
        batches = ({"name": name, "value": value} for name, value in self._done.items())
        files.write_text(path, "".join(json.dumps(line) + "\n" for line in (self._mark, *batches)))
        self._started = True

    def __len__(self) -> int:
        return len(self._done)

    def get(self, name: str) -> Any | None:
        """The value stored under the name, or None."""
        return self._done.get(name)

    @property
    def batches(self) -> dict[str, Any]:
        """Every value, by name."""
        return dict(self._done)

    def take(self, batches: dict[str, Any]) -> None:
        """Takes these values instead of its own, in memory only: those of another process."""
        self._done = dict(batches)

    def put(self, name: str, value: Any) -> None:
        """Stores a JSON value. Raises UserError if the directory cannot be written."""
        with on_disk(f"cannot write {self._path}", "choose another --workdir"):
            if self._path is not None:
                if not self._started:
                    self._start(self._path)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"name": name, "value": value}) + "\n")
        self._done[name] = value

    def forget(self) -> None:
        """Removes the file, and its directory if that is empty then.

        For a bench whose results are written, or that failed and would fail again.
        """
        if self._path is not None and self._path.exists():
            self._path.unlink()
            if not any(self._path.parent.iterdir()):
                self._path.parent.rmdir()


def _lines(path: Path) -> list[dict]:
    """The lines of a file that are JSON objects, up to the first that is not."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    objects = []
    for line in text.split("\n"):
        if (value := jsonl.parse(line)) is None:
            break
        objects.append(value)
    return objects
