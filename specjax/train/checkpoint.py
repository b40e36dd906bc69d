"""Saves and resumes a training run with Orbax; every file is checked before it is used.

Orbax writes a step in the background into a temporary directory and renames it, so a killed save
leaves nothing. It does not detect later damage: it restores an array with a flipped bit without an
error. Every step therefore has checksums, written last.

With several processes all write their parts of a state and call the same methods in the same order.
The first one writes the checksums when all have finished, and decides what is damaged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from specjax import declare, files, sharding
from specjax.errors import UserError
from specjax.files import buckets
from specjax.train.settings import Training

SAVING = 900  # seconds that a save may take


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, except that one step's damaged metrics do not hide those of the others."""

    def __init__(self, metric: str, *args: Any, **keys: Any):
        self._metric = metric
        super().__init__(*args, **keys)

    def metrics(self, step: int) -> dict[str, float] | None:
        try:
            return {self._metric: float(super().metrics(step)[self._metric])}  # pyright: ignore[reportOptionalSubscript]
        except (ValueError, TypeError, LookupError):
            # No metrics, those of another metric, or damaged ones, which the checksums detect.
            return None


class Checkpoints:
    """The last two states of a run and the best one, in ``<directory>/<step>``.

    Each step also holds the configuration of the run.
    """

    def __init__(
        self,
        directory: str | Path,
        config: dict,
        report: Callable[[str], Any] = print,
        metric: str = "heldout_loss",
        higher_is_better: bool = False,
    ):
        """Opens or creates the directory.

        Args:
            directory: of this run only.
            config: plain JSON.
            report: is called with one line for every damaged checkpoint that is skipped.
            metric: the name of the saved values. Those of another one are not compared.
            higher_is_better: whether the largest of the saved values is the best.

        Raises UserError if the directory cannot be created or read.
        """
        self.directory = Path(directory).expanduser().resolve()
        self._config, self._report = config, report
        self._metric, self._sign = metric, 1 if higher_is_better else -1
        silence(True)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._manager = _manager(self.directory, metric, self._sign)
        # ValueError: a damaged file that Orbax keeps next to a step.
        except (OSError, ValueError) as error:
            silence(False)
            raise UserError(
                f"{self.directory} cannot hold checkpoints ({reason_of(error)})"
            ) from None
        self._strays: set[Path] = set()  # files that are no part of a checkpoint, reported
        self._late = False  # whether a save was waited for ``SAVING`` seconds
        self._pending: tuple[int, Future] | None = None
        metrics = {step: self._manager.metrics(step) for step in self._manager.all_steps()}
        self._values = {step: kept[metric] for step, kept in metrics.items() if kept is not None}

    def latest(self) -> int | None:
        """The newest step that is completely on disk, or None; waits for an unfinished save."""
        self.wait()
        return self._manager.latest_step()

    def best(self) -> tuple[int, float] | None:
        """(step, value) of the best saved state that has a value; or None."""
        saved = self._values.keys() & set(self._manager.all_steps())
        ranked = sorted((self._sign * self._values[step], step) for step in saved)
        return (ranked[-1][1], self._values[ranked[-1][1]]) if ranked else None

    def best_with(self, step: int, value: float) -> tuple[int, float]:
        """(step, value) of the best state if this one is saved too; the newest of equal ones."""
        best = self.best()
        return (step, value) if best is None or self._sign * value >= self._sign * best[1] else best

    def save(self, step: int, state: Any, value: float | None = None) -> None:
        """Starts to write ``state``, a pytree of arrays, and returns.

        ``value`` decides which step is the best. Raises UserError if this save cannot be started,
        or the one before has failed (a full disk).
        """
        self.wait()
        parts = ocp.args.Composite(
            state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(self._config)
        )
        metrics = None if value is None else {self._metric: value}
        try:
            self._manager.save(step, args=parts, metrics=metrics, force=True)
        except Exception as error:
            raise self._failed(step, reason_of(error)) from error
        self._pending = step, self._sealed(step)
        if value is not None:
            self._values[step] = value

    def wait(self) -> None:
        """Returns when the last save is complete; raises UserError if it has failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, saved = pending
        try:
            error = saved.exception(SAVING)  # for a full disk Orbax raises ValueError
        except TimeoutError:
            self._late = True
            error = OSError(0, f"not finished after {SAVING} s")
        reason = sharding.first_error(None if error is None else reason_of(error))
        if reason is not None:
            raise self._failed(step, reason) from error

    def restore(self, like: Any, resume_changed: bool = False) -> tuple[int, Any] | None:
        """(step, state) of the newest undamaged checkpoint, or None if no save was ever finished.

        Removes damaged and unfinished checkpoints that are newer.

        Args:
            like: the state as arrays or ``jax.ShapeDtypeStruct``. Without it Orbax would sort the
                layers as text, "10" before "2".
            resume_changed: only report a configuration that differs.

        Raises UserError if the configuration differs, if the state has other arrays, or if every
        checkpoint is damaged.
        """
        self.wait()  # an unfinished save has no checksums yet
        steps = sorted(self._manager.all_steps(), reverse=True)
        good = self._newest_whole(steps)
        if good is None:
            self._remove_unfinished(steps)
            return None
        parts = ocp.args.Composite(config=ocp.args.JsonRestore())
        stored = self._manager.restore(good, args=parts)["config"]
        allowed = self._report if resume_changed else None
        check_same(stored, self._config, self.directory.parent, allowed)
        state = self.restore_step(good, like)
        # Remove newer steps only after a good one was restored. They must be removed: Orbax refuses
        # to save steps below its newest.
        for step in steps[: steps.index(good)]:
            self._remove(step, f"is damaged or incomplete: resuming from {good}")
        best = self.best()
        if best is not None and best[0] != good and self._newest_whole([best[0]]) is None:
            self._remove(best[0], "is the best one and damaged: removed")
        return good, state

    def restore_step(self, step: int, like: Any) -> Any:
        """The state of a saved step. Raises UserError if it is damaged or has other arrays."""
        self.wait()
        if self._newest_whole([step]) is None:
            raise UserError(f"checkpoint {step} in {self.directory} is damaged or missing")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        changed = difference(self._manager.item_metadata(step)["state"].tree, abstract)
        if changed:
            raise UserError(
                f"checkpoint {step} in {self.directory} holds another state than this run has "
                f"({changed}); use another workdir, or the old configuration"
            )
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=parts)["state"]

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.wait()
        except UserError as error:
            if kind is None:
                raise
            self._report(str(error))  # another error is being raised already
        finally:
            if not self._late:
                with contextlib.suppress(Exception):  # a failed save has raised it already
                    self._manager.close()
            silence(False)

    def _sealed(self, step: int) -> Future:
        """``_seal`` in a thread that does not keep the process from ending."""
        result: Future = Future()

        def seal() -> None:
            try:
                result.set_result(self._seal(step))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=seal, name="checkpoint", daemon=True).start()
        return result

    def _seal(self, step: int) -> None:
        """Waits for Orbax, then writes the checksums: a run killed before resumes further back.

        What is in a bucket is sent there.
        """
        self._manager.wait_until_finished()
        if not sharding.is_first():
            return
        folder = self.directory / str(step)
        files.write_text(folder / CHECKSUMS, json.dumps(checksums(folder)))
        buckets.send(self.directory)

    def _remove_unfinished(self, steps: list[int]) -> None:
        """Removes what a run killed during its first save left.

        Raises UserError if there was a finished save: then all checkpoints are damaged.
        """
        finished = [step for step in steps if (self.directory / str(step) / CHECKSUMS).exists()]
        if sharding.of_first(finished):
            raise UserError(
                f"no checkpoint in {self.directory} is undamaged; remove it to start again"
            )
        for step in steps:
            self._remove(step, "was never finished: removed, the run starts from the beginning")

    def _remove(self, step: int, reason: str) -> None:
        self._report(f"checkpoint {step} in {self.directory} {reason}")
        try:
            self._manager.delete(step)
        except OSError as error:
            raise UserError(
                f"checkpoint {step} in {self.directory} cannot be removed ({reason_of(error)})"
            ) from None
        self._values.pop(step, None)

    def _failed(self, step: int, reason: str) -> UserError:
        if self._late:  # nothing is asked of a disk that does not answer
            return UserError(
                f"checkpoint {step} could not be written to {self.directory} ({reason}); look "
                "after the disk, and the same command resumes from the checkpoint before"
            )
        self._manager.reload()
        good = self._newest(sorted(self._manager.all_steps(), reverse=True))
        kept = "there is no earlier checkpoint" if good is None else f"checkpoint {good} is intact"
        return UserError(
            f"checkpoint {step} could not be written to {self.directory} ({reason}); "
            f"{kept}; make space, and the same command resumes from there"
        )

    def _newest(self, steps: Sequence[int]) -> int | None:
        return next((step for step in steps if self._whole(step)), None)

    def _newest_whole(self, steps: Sequence[int]) -> int | None:
        """The first undamaged one of the steps, as the first process reads them."""
        return sharding.of_first(self._newest(steps) if sharding.is_first() else None)

    def _whole(self, step: int) -> bool:
        folder = self.directory / str(step)
        try:
            stored, found = files.parsed((folder / CHECKSUMS).read_text()), checksums(folder)
            strays = {folder / name for name in found.keys() - stored.keys()} - self._strays
            for path in sorted(strays):
                self._report(f"{path} is not of this checkpoint and is ignored")
            self._strays |= strays
            return bool(stored) and all(found.get(name) == value for name, value in stored.items())
        except (OSError, ValueError, AttributeError):
            return False


def _manager(directory: Path, metric: str, sign: int) -> _Manager:
    """Keeps the last two steps and the one whose value times ``sign`` is largest."""
    best = BestN(
        get_metric_fn=lambda metrics: sign * metrics[metric],
        n=1,
        keep_checkpoints_without_metrics=False,
    )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=AnyPreservationPolicy([LatestN(2), best]),
        best_fn=best.get_metric_fn,  # without it Orbax writes no metrics
        cleanup_tmp_directories=True,  # left by a killed save
        async_options=ocp.AsyncOptions(timeout_secs=SAVING),
    )
    handlers = {"state": ocp.StandardCheckpointHandler(), "config": ocp.JsonCheckpointHandler()}
    return _Manager(metric, directory, options=options, item_handlers=handlers)


CHECKSUMS = "checksums.json"


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a step, without the list of checksums."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): files.sha256(path)
        for path in sorted(paths)
        if not path.name.startswith(CHECKSUMS)
    }


def reason_of(error: BaseException) -> str:
    """Why a file could not be written, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # TensorStore puts the error number of the system into its message.
    number = re.search(r"os_error_code='(\d+)'", str(error))
    message = os.strerror(int(number[1])) if number else str(error).strip().partition("\n")[0]
    return message or type(error).__name__


def silence(on: bool) -> None:
    """Drops the log records of Orbax from now on, or no longer.

    It logs every error that it also raises, with a traceback and from several threads, and warns of
    intended states (a checkpoint without a metric). After a failed save TensorStore gives
    ``sys.unraisablehook`` a traceback for every array that was still being written.
    """
    logger = logging.getLogger("absl")
    (logger.addFilter if on else logger.removeFilter)(_not_of_orbax)
    if on and sys.unraisablehook is not _quiet_hook:
        _hooks.append(sys.unraisablehook)
        sys.unraisablehook = _quiet_hook
    elif not on and sys.unraisablehook is _quiet_hook:
        sys.unraisablehook = _hooks.pop()


_hooks: list[Callable[..., Any]] = []  # what ``_quiet_hook`` stands for


def _quiet_hook(unraisable: Any) -> None:
    """``sys.unraisablehook`` without what TensorStore reports to a loop of Orbax that has ended."""
    if str(unraisable.exc_value) != "Event loop is closed":
        _hooks[-1](unraisable)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def check_same(
    stored: dict, config: dict, workdir: str | Path, report: Callable[[str], Any] | None = None
) -> None:
    """Compares two configurations (plain JSON); names the keys in which they differ.

    A larger ``train.steps`` is no difference: it lengthens the run. A key that is new since the run
    began had its default. Raises UserError if they differ; with ``report``, calls it with a message
    instead.
    """
    trees = (declare.defaults(Training), stored, config)
    known, before, now = (
        _leaves(json.loads(json.dumps(tree)), lambda value: not isinstance(value, dict))
        for tree in trees
    )
    before = {key: known[key] for key in known.keys() & now.keys()} | before
    if "train.steps" in before and before["train.steps"] < now.get("train.steps", 0):
        before["train.steps"] = now["train.steps"]
    keys = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    if not keys:
        return
    changes = ", ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys)
    if report is None:
        raise UserError(
            f"{workdir} holds a run with another config ({changes}); "
            "use another workdir, or the old values"
        )
    report(f"the run in {workdir} is resumed with a changed config: {changes}")


def difference(stored: Any, like: Any) -> str:
    """The first array that only one of two states has, or whose shape or dtype differs; else ""."""
    before, now = _leaves(stored), _leaves(like)
    for name in sorted(before | now):
        if name not in before or name not in now:
            return f"{name} is {'new' if name not in before else 'gone'}"
        was, now_is = (f"{leaf.dtype}{list(leaf.shape)}" for leaf in (before[name], now[name]))
        if was != now_is:
            return f"{name} was {was}, is {now_is}"
    return ""


def _leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Dotted name -> leaf."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]
    }
