"""Saving and resuming one training run: a thin layer over Orbax that trusts no file it has not checked.

Orbax writes a step in the background into a temporary directory and renames it, so a killed save leaves nothing behind.
What it does not see is damage afterwards: a flipped bit in an array is restored without a word. Every step therefore
carries checksums, written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from specjax.errors import UserError

_CHECKSUMS = "checksums.json"
_METRIC = "value"


class _Manager(ocp.CheckpointManager):
    """Orbax's, which reads the metrics of all steps at once, and none of them if one is damaged."""

    def metrics(self, step: int) -> dict[str, float] | None:
        try:
            return {_METRIC: float(super().metrics(step)[_METRIC])}  # pyright: ignore[reportOptionalSubscript]
        except (ValueError, TypeError, LookupError):  # none, or garbage: then the checksums tell
            return None


class Checkpoints:
    """The last two states of a run and the best one, ``<directory>/<step>``, each with the configuration that made it."""

    def __init__(
        self,
        directory: str | Path,
        config: dict,
        say: Callable[[str], Any] = print,
        higher_is_better: bool = False,
    ):
        """``config`` is plain JSON; ``say`` is told, in one line, when a damaged checkpoint is passed over.

        Raises ``UserError`` for a directory that cannot be made or read.
        """
        self.directory = Path(directory).expanduser().resolve()
        self._config, self._say, self._sign = config, say, 1 if higher_is_better else -1
        best = BestN(
            get_metric_fn=lambda metrics: self._sign * metrics[_METRIC],
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(2), best]),
            best_fn=best.get_metric_fn,  # without it Orbax writes no metrics
            cleanup_tmp_directories=True,  # what a killed save has left
        )
        _silence(True)
        try:
            handlers = {
                "state": ocp.StandardCheckpointHandler(),
                "config": ocp.JsonCheckpointHandler(),
            }
            self.directory.mkdir(parents=True, exist_ok=True)
            self._manager = _Manager(self.directory, options=options, item_handlers=handlers)
        except (
            OSError,
            ValueError,
        ) as error:  # ValueError: what Orbax says of itself beside a step is garbage
            _silence(False)
            raise UserError(
                f"{self.directory} cannot hold checkpoints ({_reason(error)})"
            ) from None
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, Future] | None = None
        metrics = {step: self._manager.metrics(step) for step in self._manager.all_steps()}
        self._values = {
            step: stored[_METRIC] for step, stored in metrics.items() if stored is not None
        }

    def latest(self) -> int | None:
        """The newest step that is safe on disk, or None; waits for a save that is under way."""
        self.wait()
        return self._manager.latest_step()

    def best(self) -> tuple[int, float] | None:
        """(step, value) of the best state saved, among those that have a value; or None."""
        kept = set(self._manager.all_steps())
        ranked = [
            (self._sign * value, step) for step, value in self._values.items() if step in kept
        ]
        return (max(ranked)[1], self._values[max(ranked)[1]]) if ranked else None

    def best_with(self, step: int, value: float) -> tuple[int, float]:
        """(step, value) of the best state, were this one saved as well; of equal ones the newest."""
        best = self.best()
        return (step, value) if best is None or self._sign * value >= self._sign * best[1] else best

    def save(self, step: int, state: Any, value: float | None = None) -> None:
        """Begins to write ``state``, a pytree of arrays, and returns; ``value`` is what the best is chosen by.

        Raises ``UserError`` when this save could not be begun or the one before did not succeed (a full disk).
        """
        self.wait()
        parts = ocp.args.Composite(
            state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(self._config)
        )
        try:
            self._manager.save(
                step, args=parts, metrics=None if value is None else {_METRIC: value}, force=True
            )
        except Exception as error:
            raise self._failed(step, error) from error
        self._pending = step, self._background.submit(self._seal, step)
        if value is not None:
            self._values[step] = value

    def wait(self) -> None:
        """Returns when the last save is complete; raises ``UserError`` when it did not succeed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending[1].result()
            except Exception as error:  # Orbax raises ValueError for a full disk, for one
                raise self._failed(pending[0], error) from error

    def restore(self, like: Any, resume_changed: bool = False) -> tuple[int, Any] | None:
        """(step, state) of the newest undamaged checkpoint, or None where none was ever finished.

        ``like`` holds arrays or ``jax.ShapeDtypeStruct``; without it Orbax would sort the layers as text, and put "10"
        before "2". Raises ``UserError`` when the configuration differs (``resume_changed`` only says so), when the state
        has other arrays, or when every checkpoint is damaged. What a run killed during its first save has left is removed.
        """
        self.wait()  # a save that is under way has no checksums either
        steps = sorted(self._manager.all_steps(), reverse=True)
        good = next((step for step in steps if self._whole(step)), None)
        if good is None:
            if any((self.directory / str(step) / _CHECKSUMS).exists() for step in steps):
                raise UserError(
                    f"no checkpoint in {self.directory} is undamaged; remove it to start anew"
                )
            for step in steps:
                self._say(
                    f"checkpoint {step} in {self.directory} was never finished: removed, the run begins anew"
                )
                self._remove(step)
            return None
        stored = self._manager.restore(
            good, args=ocp.args.Composite(config=ocp.args.JsonRestore())
        )["config"]
        check_same(
            stored, self._config, self.directory.parent, self._say if resume_changed else None
        )
        state = self.restore_step(good, like)
        # Only now, with a good one in hand: Orbax refuses to save steps below its newest.
        for step in steps[: steps.index(good)]:
            self._say(
                f"checkpoint {step} in {self.directory} is damaged or incomplete: resuming from {good}"
            )
            self._remove(step)
        best = self.best()
        if best is not None and best[0] != good and not self._whole(best[0]):
            self._say(
                f"checkpoint {best[0]} in {self.directory}, the best so far, is damaged: it is removed"
            )
            self._remove(best[0])
        return good, state

    def restore_step(self, step: int, like: Any) -> Any:
        """The state of one step that is kept; raises ``UserError`` when it is damaged or has other arrays."""
        self.wait()
        if not self._whole(step):
            raise UserError(f"checkpoint {step} in {self.directory} is damaged or not there")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        difference = _difference(self._manager.item_metadata(step)["state"].tree, abstract)
        if difference:
            told = f"checkpoint {step} in {self.directory} holds another state than this run has ({difference})"
            raise UserError(f"{told}; use another workdir, or the old configuration")
        return self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        )["state"]

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.wait()
        except UserError as error:
            if kind is None:
                raise
            self._say(str(error))  # beside the error that is under way
        finally:
            self._background.shutdown()
            with contextlib.suppress(Exception):  # what a failed save has raised already
                self._manager.close()
            _silence(False)

    def _seal(self, step: int) -> None:
        """Waits for Orbax, then writes the checksums: a run killed before falls back to the step before this one."""
        self._manager.wait_until_finished()
        folder = self.directory / str(step)
        partial = folder / f"{_CHECKSUMS}.partial"
        sums = json.dumps(_checksums(folder))
        partial.write_text(sums)
        os.replace(partial, folder / _CHECKSUMS)

    def _remove(self, step: int) -> None:
        try:
            self._manager.delete(step)
        except OSError as error:
            raise UserError(
                f"checkpoint {step} in {self.directory} cannot be removed ({_reason(error)})"
            ) from None
        self._values.pop(step, None)

    def _failed(self, step: int, error: Exception) -> UserError:
        self._manager.reload()
        good = next(
            (kept for kept in sorted(self._manager.all_steps(), reverse=True) if self._whole(kept)),
            None,
        )
        kept = (
            "there is no checkpoint before it" if good is None else f"checkpoint {good} is intact"
        )
        told = f"checkpoint {step} could not be written to {self.directory} ({_reason(error)})"
        return UserError(
            f"{told}; {kept}, and the same command goes on from there when there is space"
        )

    def _whole(self, step: int) -> bool:
        folder = self.directory / str(step)
        try:
            return json.loads((folder / _CHECKSUMS).read_text()) == _checksums(folder)
        except (OSError, ValueError):
            return False


def check_same(
    stored: dict, config: dict, workdir: str | Path, say: Callable[[str], Any] | None = None
) -> None:
    """Raises ``UserError`` naming the keys in which two configurations differ, or only tells ``say``, where it is given."""
    before, now = dict(_flat(stored)), dict(_flat(json.loads(json.dumps(config))))
    keys = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    if not keys:
        return
    told = ", ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys)
    if say is None:
        raise UserError(
            f"{workdir} holds a run with another config ({told}); use another workdir, or the old values"
        )
    say(f"the run in {workdir} goes on with a changed config: {told}")


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _difference(stored: Any, like: Any) -> str:
    """The first array that one of two states lacks or has in another shape or dtype; empty if there is none."""

    def leaves(tree):
        found = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {
            ".".join(
                str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
                for key in path
            ): leaf
            for path, leaf in found
        }

    before, now = leaves(stored), leaves(like)
    for name in sorted(before | now):
        if name not in before or name not in now:
            return f"{name} is {'new' if name not in before else 'gone'}"
        told = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in (before[name], now[name])]
        if told[0] != told[1]:
            return f"{name} was {told[0]}, is {told[1]}"
    return ""


def _checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a step but the list itself."""
    sums = {}
    for path in sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(_CHECKSUMS)
    ):
        with open(path, "rb") as file:
            sums[path.relative_to(folder).as_posix()] = hashlib.file_digest(
                file, "sha256"
            ).hexdigest()
    return sums


def _reason(error: BaseException) -> str:
    """Why a file could not be written, in one line: TensorStore hides the system's error number in its text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(number[1])) if number else str(error).partition("\n")[0]


class _FromOrbax(logging.Filter):
    """Orbax logs, with a traceback and from several threads, every error that it raises as well, and warns of what is meant
    (a checkpoint that was not measured)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname


_FILTER = _FromOrbax()


def _silence(on: bool) -> None:
    logger = logging.getLogger("absl")
    (logger.addFilter if on else logger.removeFilter)(_FILTER)
