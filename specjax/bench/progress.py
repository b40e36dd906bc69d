"""What a bench has measured so far, on disk: a bench that was killed goes on where it was.

One line per pass, written as soon as the pass is over, behind a line that says of what: another configuration, other prompts
or other files of a model make it worthless, and it is begun anew. Gone when the results are written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.bench import results
from specjax.config import Config
from specjax.errors import UserError

NAME = "unfinished.jsonl"


def fingerprint(config: Config, prompts: Sequence[Sequence[int]]) -> str:
    """Of everything that a measured pass depends on: settings, token ids, the machine, this program, and the files that the
    settings name (the last two by size and time of their files)."""
    settings = json.loads(config.to_json_best_effort())
    head = {key: value for key, value in results.head().items() if key != "date"}
    ways = [
        *(
            str(getattr(jax.config, name))
            for name in ("jax_enable_x64", "jax_default_matmul_precision")
        ),
        os.environ.get("XLA_FLAGS", ""),
    ]
    own = sorted(
        (str(f), f.stat().st_size, f.stat().st_mtime_ns)
        for f in Path(__file__).parent.rglob("*.py")
    )
    seen = [head, ways, own, settings, _files(settings), [list(map(int, p)) for p in prompts]]
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def _files(value: Any) -> list:
    """(path, size, time) of the files that are named somewhere in the settings, and of those in named directories."""
    if isinstance(value, dict | list):
        each = value.values() if isinstance(value, dict) else value
        return [found for inner in each for found in _files(inner)]
    try:
        path = Path(value).expanduser() if isinstance(value, str) and value else None
        if path is None or not path.exists():
            return []
        files = [path] if path.is_file() else [*path.glob("*"), *path.glob("model/*")]
        return sorted(
            (str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()
        )
    except (OSError, RuntimeError):  # a text that is no path
        return []


class Progress:
    """The passes measured so far, by a name for each.

    Args:
        workdir: where the file lies; None keeps nothing.
        mark: ``fingerprint`` of what is measured. A file with another one is begun anew.
    """

    def __init__(self, workdir: Path | None = None, mark: str = ""):
        self._path = None if workdir is None else workdir / NAME
        self._done: dict[str, Any] = {}
        if self._path is None:
            return
        self._mark, self._begun = {"fingerprint": mark}, False
        lines = _lines(self._path)
        if lines and lines[0] == self._mark:
            self._done = {
                line["pass"]: line["value"] for line in lines[1:] if {"pass", "value"} <= set(line)
            }

    def _begin(self, path: Path) -> None:
        """Writes the file again, without the half a line that may be at its end."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = [
            self._mark,
            *({"pass": name, "value": value} for name, value in self._done.items()),
        ]
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in whole), encoding="utf-8")
        fresh.replace(path)
        self._begun = True

    def __len__(self) -> int:
        return len(self._done)

    def get(self, name: str) -> Any | None:
        """What was put under the name, if anything."""
        return self._done.get(name)

    def put(self, name: str, value: Any) -> None:
        """Keeps a JSON value. Raises UserError: the directory cannot be written."""
        try:
            if self._path is not None:
                if not self._begun:
                    self._begin(self._path)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"pass": name, "value": value}) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}; choose another --workdir"
            ) from None
        self._done[name] = value

    def forget(self) -> None:
        """Takes the file away, and the directory if nothing else is in it: the results are written, or there will be none."""
        if self._path is not None and self._path.exists():
            self._path.unlink()
            if not any(self._path.parent.iterdir()):
                self._path.parent.rmdir()


def _lines(path: Path) -> list[dict]:
    """The lines of a file that are JSON objects, up to the first that is not."""
    found = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                value = json.loads(line)
            except ValueError:
                break
            if not isinstance(value, dict):
                break
            found.append(value)
    return found
