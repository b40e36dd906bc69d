"""Saving and resuming one training run: a thin layer over Orbax that trusts no file it has not checked.

Orbax writes a step into a temporary directory and renames it, so a killed save leaves nothing behind. What it does not
see is damage afterwards: a flipped bit in an array is restored without a word. Every step therefore carries checksums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from specjax.errors import UserError

_CHECKSUMS = "checksums.json"


class Checkpoints:
    """The last two states of a run, ``<directory>/<step>``, each with the configuration that made it."""

    def __init__(self, directory: str | Path, config: dict, say: Callable[[str], Any] = print):
        """``config`` is plain JSON; ``say`` is told, in one line, when a damaged checkpoint is passed over."""
        self.directory = Path(directory).expanduser().resolve()
        self._config, self._say = config, say
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """The newest step saved, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Writes ``state``, a pytree of arrays."""
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(self._config))
        self._manager.save(step, args=parts, force=True)
        folder = self.directory / str(step)
        # A run killed before this line leaves a step without checksums: the next one falls back to the step before.
        (folder / _CHECKSUMS).write_text(json.dumps(_checksums(folder)))

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """(step, state) of the newest undamaged checkpoint, or None where there is none at all.

        ``like`` holds arrays or ``jax.ShapeDtypeStruct``; without it Orbax would sort the layers as text, and put "10"
        before "2". Raises ``UserError`` when the configuration differs, or when every checkpoint is damaged.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        good = next((step for step in steps if self._whole(step)), None)
        if good is None:
            if steps:
                raise UserError(f"no checkpoint in {self.directory} is undamaged; remove it to start anew")
            return None
        stored = self._manager.restore(good, args=ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]
        check_same(stored, self._config, self.directory.parent)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        parts = self._manager.restore(good, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
        for step in steps[: steps.index(good)]:
            self._say(f"checkpoint {step} in {self.directory} is damaged or incomplete: resuming from {good}")
            # Only now, with a good one in hand: Orbax refuses to save steps below its newest.
            self._manager.delete(step)
        return good, parts["state"]

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_) -> None:
        self._manager.close()

    def _whole(self, step: int) -> bool:
        folder = self.directory / str(step)
        try:
            return json.loads((folder / _CHECKSUMS).read_text()) == _checksums(folder)
        except (OSError, ValueError):
            return False


def check_same(stored: dict, config: dict, workdir: str | Path) -> None:
    """Raises ``UserError`` naming the keys in which two configurations differ."""
    before, now = dict(_flat(stored)), dict(_flat(json.loads(json.dumps(config))))
    keys = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    if keys:
        told = ", ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys)
        raise UserError(f"{workdir} holds a run with another config ({told}); use another workdir, or the old values")


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a step but the list itself."""
    sums = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _CHECKSUMS):
        with open(path, "rb") as file:
            sums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums
