"""The training loop: a compiled step, held-out evaluation, records, checkpoints, and resuming.

All randomness is a function of the seed and the step, so a run that was killed and resumed ends
with exactly the parameters of an uninterrupted run. SIGTERM saves the run after the next step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import sharding
from specjax.errors import UserError
from specjax.theory import devices
from specjax.train import update
from specjax.train.checkpoint import Checkpoints
from specjax.train.display import Display, report
from specjax.train.evaluate import labels, mean
from specjax.train.objectives import Loss
from specjax.train.optimise import Optimiser
from specjax.train.placement import Placement, Source, place
from specjax.train.records import Clock, Log
from specjax.train.settings import Schedule, Settings
from specjax.train.update import Programs, Rewrite, compile_programs
from specjax.types import Batch


class Task(NamedTuple):
    """What is trained, on what, and how it is judged."""

    loss: Loss
    params: Any  # initial
    target_params: Any
    batches: Source
    eval_batches: Sequence[Batch] = ()  # logged as heldout_*: means of loss and metrics
    # Of parameters, on the host; logged as heldout_*, not at every evaluation (see ``Schedule``).
    examine: Callable[[Any], dict[str, float]] | None = None
    rewrite: Rewrite | None = None  # changes each batch before the update; is compiled
    # Of ``eval_batches``: without the noise that ``loss`` adds in training. None: ``loss``.
    held_out_loss: Loss | None = None


def train(
    task: Task,
    optimiser: Optimiser,
    schedule: Schedule,
    workdir: str | Path,
    settings: Settings | None = None,
    config: dict | None = None,
) -> Any:
    """Minimises ``task.loss``; returns the parameters. Resumes from ``workdir/checkpoints``.

    The parameters stay on the mesh if it divides them or other processes have them too; otherwise
    they are on its first device. All processes must call this with the same arguments.
    ``metrics.jsonl`` and ``tensorboard/`` get a record per logged step: means of loss and metrics
    since the last record (weighted by the metric "weight", the number of labels), held-out values,
    and shares of wall time. Saved are the last two checkpoints and the best one.

    Args:
        task: see ``Task``.
        optimiser: made for ``schedule.steps`` steps.
        schedule: see ``Schedule``.
        workdir: is created.
        settings: see ``Settings``.
        config: plain JSON that a resumed run must have in common with the stored one.

    Raises UserError for settings or a stored run that do not fit, if a value is no longer finite,
    and if the disk is full.
    """
    settings = settings or Settings()
    if settings.keep == "best" and not _evaluates(task):
        raise UserError(
            "config.train.keep is 'best', but nothing is evaluated; "
            "keep 'last', or give text to evaluate on"
        )
    placement = place(settings.mesh, settings.devices)
    begin = functools.partial(update.fresh, optimiser=optimiser, ema=settings.ema)
    state = jax.eval_shape(begin, task.params)
    programs = compile_programs(
        *(task.loss, task.held_out_loss, task.rewrite),
        *(optimiser, settings, placement, placement.state(state)),
    )
    _check_rows(task.batches, settings.accumulate, placement)
    target_params = placement.put_params(update.cast(task.target_params, settings.precision))
    # Nothing is written before all arguments are checked.
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(workdir / "checkpoints", config or {}, report, *settings.decides)
        )
        # Restored where it is to be stored.
        restored = checkpoints.restore(placement.like(state), settings.resume_changed)
        start, state = restored or (0, placement.begin(begin, task.params))
        _check_start(start, schedule.steps, workdir)
        log = stack.enter_context(Log(workdir, start))
        display = stack.enter_context(Display(start, schedule.steps))
        parts = (checkpoints, log, display, stack.enter_context(sharding.Preemption()))
        task = task._replace(target_params=target_params)
        run = _Run(task, programs, placement, schedule, settings, *parts)
        params = programs.averaged(run.train(start, state))
        return params if placement.spread else jax.device_put(params, placement.first)


@dataclasses.dataclass
class _Run:
    """The parts of a step, and what is kept between steps."""

    task: Task  # with ``target_params`` cast and on the devices
    programs: Programs
    placement: Placement
    schedule: Schedule
    settings: Settings
    checkpoints: Checkpoints
    log: Log
    display: Display
    preemption: sharding.Preemption
    clock: Clock = dataclasses.field(default_factory=Clock)
    # Metrics of the steps since the last record. They stay on the device until they are needed, so
    # that no step waits for the device.
    recent: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    flops: int = 0  # of an update
    utilisation: float | None = None  # MFU at one token per second
    part: str = "first_evaluation"  # of the wall time, to which the next evaluation belongs

    def __post_init__(self):
        self.key, self.rewrite_key = jax.random.split(jax.random.key(self.settings.seed))

    def train(self, start: int, state: Any) -> Any:
        """All steps after ``start``; returns the state whose parameters are kept."""
        target_params, steps = self.task.target_params, self.schedule.steps
        batch: Any = self.placement.fetch(self.task.batches, start) if start < steps else None
        for step in range(start + 1, steps + 1):
            batch = self._rewrite(step, state, batch)
            if step == start + 1:
                self._count_operations(state, batch)
            self.clock.count(len(batch.tokens) * (batch.tokens.shape[1] - 1))
            state, metrics = self.programs.advance(state, target_params, batch, self.key)
            self.recent.append(metrics)
            if step == start + 1:  # the first step was mostly compilation: it is not counted
                jax.block_until_ready(metrics)
                self.clock.restart()
            if step < steps:
                batch = self._fetch_ahead(step, metrics)
            ends = self.preemption.reached()
            self._keep(step, state, ends)
            self.display.reach(step)
            if ends:
                self.checkpoints.wait()
                report(f"step {step} is saved; the same command goes on from there")
                self.preemption.end()
        with self.clock("checkpoint"):
            self.checkpoints.wait()
        if (summary := self.clock.summary()) is not None:
            report(summary)
        return state if self.settings.keep == "last" else self._best(state)

    def _count_operations(self, state: Any, batch: Batch) -> None:
        """Sets the operations of an update, and the share of the devices' that a token/s uses."""
        arguments = (state, self.task.target_params, batch, self.key)
        self.flops = update.product_operations(self.programs.advance.trace(*arguments).jaxpr)
        device = devices.of_kind(self.placement.first.device_kind)
        if device is not None:
            tokens = len(batch.tokens) * (batch.tokens.shape[1] - 1)
            self.utilisation = self.flops / tokens / (device.flops * self.placement.mesh.size)

    def _fetch_ahead(self, step: int, metrics: dict[str, Any]) -> Batch:
        """Makes the next batch while the device computes; counts the time that the device waits."""
        began = time.perf_counter()
        batch = self.placement.fetch(self.task.batches, step)
        if metrics["loss"].is_ready():
            self.clock.add("data", time.perf_counter() - began)
        return batch

    def _rewrite(self, step: int, state: Any, batch: Batch) -> Batch:
        if self.programs.rewrite is None:
            return batch
        jax.block_until_ready(state)  # so that only the rewriting is timed
        with self.clock("rewrite"):
            key = jax.random.fold_in(self.rewrite_key, step)
            batch = self.programs.rewrite(state["params"], self.task.target_params, batch, key)
            return jax.block_until_ready(batch)

    def _keep(self, step: int, state: Any, ends: bool) -> None:
        """Logs, evaluates and saves, if the schedule demands it or the run ``ends`` here."""
        last, schedule = step == self.schedule.steps, self.schedule
        logged = last or step % schedule.log_every == 0
        evaluated = schedule.evaluates(step)
        saved = last or ends or step % schedule.checkpoint_every == 0
        value = None
        if logged or evaluated or saved:
            self._collect(step)
            record = {"step": step, **mean(self.recent), "lr": float(self.programs.rate(step - 1))}
            record |= {**labels(self.recent), "flops": self.flops}
            if evaluated and _evaluates(self.task):
                value = self._evaluate(step, state, record)
                saved = saved or record.get("best_step") == step
            rate, record["time_share"] = self.clock.lap()
            record["tokens_per_second"] = rate
            if rate is not None and self.utilisation is not None:
                record["mfu"] = rate * self.utilisation
            self.log.write(record)
            self.display.show(record)
            self.recent = []
        if saved:
            with self.clock("checkpoint"):
                self.checkpoints.save(step, state, value)

    def _collect(self, step: int) -> None:
        """Moves the metrics since the last record to the host. Raises UserError: not finite."""
        self.recent = jax.device_get(self.recent)
        for number, values in enumerate(self.recent, step - len(self.recent) + 1):
            _check_finite(values, number, self.checkpoints)

    def _evaluate(self, step: int, state: Any, record: dict[str, Any]) -> float | None:
        """Adds held-out values and the best step to ``record``; returns the value that decides."""
        best = self.settings.best
        examined = self.settings.examine_always or self.schedule.examines(step)
        with self.clock(self.part):
            record |= self._held_out(self.programs.averaged(state), examined)
        self.part = "evaluate"
        _check_finite(record, step, self.checkpoints)
        value = record.get(best)
        if value is not None:
            record["best_step"], record["best_value"] = self.checkpoints.best_with(step, value)
        elif self.settings.keep == "best" or best != "heldout_loss":
            names = ", ".join(name for name in record if name.startswith("heldout_"))
            raise UserError(f"config.train.best is {best!r}; it must be one of {names}")
        return value

    def _held_out(self, params: Any, examined: bool) -> dict[str, float]:
        task, values = self.task, {}
        if task.eval_batches:
            values |= self.programs.evaluate(params, task.target_params, task.eval_batches)
        if task.examine and examined:
            if not self.placement.spread:
                params = jax.device_put(params, self.placement.first)
            values |= task.examine(params)
        return {f"heldout_{name}": float(value) for name, value in values.items()}

    def _best(self, like: Any) -> Any:
        best = self.checkpoints.best()
        if best is None:
            raise UserError(
                f"no checkpoint in {self.checkpoints.directory} has a value of "
                f"{self.settings.best}; keep 'last'"
            )
        return self.checkpoints.restore_step(best[0], like)


def _evaluates(task: Task) -> bool:
    return bool(task.eval_batches) or task.examine is not None


def _check_rows(batches: Source, accumulate: int, placement: Placement) -> None:
    parts = placement.parts
    if accumulate * parts == 1:
        return
    rows = len(batches.batch(0).tokens)
    if rows % (accumulate * parts):
        counts = ((accumulate, "parts (accumulate)"), (parts, "devices"))
        among = " on ".join(f"{n} {name}" for n, name in counts if n > 1)
        raise UserError(
            f"a batch of {rows} rows cannot be divided among {among}; "
            f"take a multiple of {accumulate * parts}"
        )


def _check_start(start: int, steps: int, workdir: Path) -> None:
    if start > steps:
        raise UserError(
            f"{workdir} holds a run of {start} steps, but config.train.steps is {steps}; "
            f"give at least {start}"
        )
    if start:
        report(f"resuming from step {start} of {steps} in {workdir}")


def _check_finite(values: dict[str, Any], step: int, checkpoints: Checkpoints) -> None:
    """Raises UserError for a value that is not finite; names a loss before other values."""
    for name, value in sorted(values.items(), key=lambda item: "loss" not in item[0]):
        if not np.isfinite(jax.tree.leaves(value)).all():
            good = checkpoints.latest()
            kept = f"the last good checkpoint is step {good}"
            raise UserError(
                f"{name} is {value} at step {step}; "
                f"{'there is no checkpoint yet' if good is None else kept}; lower the learning rate"
            )
