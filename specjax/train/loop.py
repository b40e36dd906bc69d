"""The training loop: one compiled step, held-out evaluation, metrics, checkpoints, and a resume that changes nothing.

Everything random is a function of the seed and the step, so a run that was killed and started again ends with the very
same parameters as one that was not.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.errors import UserError
from specjax.train import update
from specjax.train.checkpoint import Checkpoints
from specjax.train.display import Clock, Display, Log, say
from specjax.train.objectives import Loss
from specjax.train.optimise import Optimiser
from specjax.types import Batch

_HIGHER_IS_BETTER = ("tau", "alpha", "agreement", "accuracy")


Rewrite = Callable[[Any, Any, Batch, jax.Array], Batch]


class Source(Protocol):
    """Where batches come from: a pure function of the step (counted from 0)."""

    def batch(self, step: int) -> Batch: ...  # of NumPy arrays


def train(
    loss: Loss,
    params: Any,
    target_params: Any,
    batches: Source,
    *,
    optimiser: Optimiser,
    steps: int,
    workdir: str | Path,
    eval_batches: Sequence[Batch] = (),
    examine: Callable[[Any], dict[str, float]] | None = None,
    rewrite: Rewrite | None = None,
    eval_every: int = 100,
    checkpoint_every: int = 100,
    log_every: int = 10,
    config: dict | None = None,
    seed: int = 0,
    accumulate: int = 1,
    ema: float = 0.0,
    precision: str = "float32",
    devices: Sequence[Any] | None = None,  # of jax.Device
    best: str = "heldout_loss",
    keep: str = "last",
    resume_changed: bool = False,
) -> Any:
    """Minimises ``loss`` over ``steps`` batches and gives the parameters; resumes from ``workdir/checkpoints``.

    ``metrics.jsonl`` and ``tensorboard/`` get one record a logged step: means since the last one (a metric "weight", the
    number of labels, weighs them), held-out values as ``heldout_*``, what ``examine(params)`` measures on the host among
    them, and where the time went. ``rewrite(params, target_params, batch, key) -> Batch`` is compiled and changes each
    batch before the update (text of the model's own). The gradient is that of ``accumulate`` parts of the batch, one after
    the other, each divided among ``devices`` (None = all local ones). With ``precision`` "bfloat16" loss and ``rewrite``
    see parameters cast to it; parameters, gradients and the optimiser's state are float32. ``ema`` averages the parameters
    with this decay, corrected for its start; evaluated, examined and returned is then the average.

    Kept are the last two checkpoints and the one with the best ``best`` (a logged name: the lowest, or the highest of tau,
    alpha, agreement, accuracy); ``keep`` "best" returns its parameters instead of the last ones. ``config`` (plain JSON)
    is what a resumed run must share with the run before, unless ``resume_changed``. Raises ``UserError`` when it does
    not, for options that cannot be, when the loss or the gradient is no longer finite, and when the disk is full.
    """
    _check(
        accumulate,
        ema,
        precision,
        keep,
        steps=steps,
        log=log_every,
        evaluate=eval_every,
        checkpoint=checkpoint_every,
    )
    if keep == "best" and not eval_batches and examine is None:
        raise UserError(
            "config.train.keep is 'best', but nothing is evaluated; keep 'last', or give text to evaluate on"
        )
    mesh = Mesh(np.asarray(devices or jax.local_devices()), ("data",), axis_types=(AxisType.Auto,))
    everywhere, rows = (
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec("data")),
    )
    key, rewrite_key = jax.random.split(jax.random.key(seed))
    loss = update.in_precision(loss, precision)
    evaluate = evaluator(
        loss, lambda batch: jax.device_put(batch, everywhere if _rows(batch) % mesh.size else rows)
    )
    advance = jax.jit(
        update.step(loss, optimiser, accumulate, ema), donate_argnums=0, out_shardings=everywhere
    )
    trained = jax.jit(functools.partial(update.averaged, ema=ema)) if ema else update.averaged
    if rewrite is not None:
        rewrite = jax.jit(update.in_precision(rewrite, precision), out_shardings=rows)

    def fetch(step):
        return jax.device_put(batches.batch(step), rows)

    def held_out(params):
        values = evaluate(params, target_params, eval_batches) if eval_batches else {}
        values |= examine(jax.device_put(params, mesh.devices.flat[0])) if examine else {}
        return {f"heldout_{name}": float(value) for name, value in values.items()}

    state = jax.device_put(update.fresh(params, optimiser, ema), everywhere)
    if accumulate * mesh.size > 1:
        _check_rows(_rows(batches.batch(0)), accumulate, mesh.size)
    target_params = jax.device_put(update.cast(target_params, precision), everywhere)
    workdir = Path(workdir)
    workdir.mkdir(
        parents=True, exist_ok=True
    )  # only now, when nothing is wrong with what was asked for
    with contextlib.ExitStack() as stack:
        higher = any(word in best for word in _HIGHER_IS_BETTER)
        checkpoints = stack.enter_context(
            Checkpoints(workdir / "checkpoints", config or {}, say, higher)
        )
        start, state = checkpoints.restore(state, resume_changed) or (0, state)
        if start > steps:
            raise UserError(
                f"{workdir} holds a run of {start} steps, more than the {steps} asked for; ask for as many"
            )
        if start:
            say(f"resuming from step {start} of {steps} in {workdir}")
        log, display = (
            stack.enter_context(Log(workdir, start)),
            stack.enter_context(Display(start, steps)),
        )
        clock, recent = (
            Clock(),
            [],
        )  # the values stay on the device until somebody looks: no synchronisation in between
        batch: Any = fetch(start) if start < steps else None
        for step in range(start + 1, steps + 1):
            if rewrite is not None:
                jax.block_until_ready(state)  # so that what follows is timed alone
                with clock("rewrite"):
                    batch = rewrite(
                        state["params"], target_params, batch, jax.random.fold_in(rewrite_key, step)
                    )
                    jax.block_until_ready(batch)
            clock.count(batch.tokens[:, 1:].size)
            state, measured = advance(state, target_params, batch, key)
            recent.append(measured)
            if step == start + 1:  # this one was compilation: not counted
                jax.block_until_ready(measured)
                clock.restart()
            if (
                step < steps
            ):  # the next batch is made while the device works; only what that waits for is lost
                began = time.perf_counter()
                batch = fetch(step)
                if measured["loss"].is_ready():
                    clock.add("data", time.perf_counter() - began)
            logged, evaluated, saved = (
                step == steps or step % n == 0 for n in (log_every, eval_every, checkpoint_every)
            )
            if logged or evaluated or saved:
                recent = jax.device_get(recent)
                for at, values in enumerate(recent, step - len(recent) + 1):
                    _check_finite(values, at, checkpoints)
            value = None
            if logged or evaluated:
                record: dict[str, Any] = {
                    "step": step,
                    **_mean(recent),
                    "lr": float(optimiser.schedule(step - 1)),
                }
                if evaluated and (eval_batches or examine):
                    with clock("evaluate"):
                        record |= held_out(trained(state))
                    _check_finite(record, step, checkpoints)
                    value = record.get(best)
                    if value is not None:
                        record["best_step"], record["best_value"] = checkpoints.best_with(
                            step, value
                        )
                        saved = saved or record["best_step"] == step
                    elif keep == "best" or best != "heldout_loss":
                        names = ", ".join(name for name in record if name.startswith("heldout_"))
                        raise UserError(f"config.train.best is {best!r}; it must be one of {names}")
                record["tokens_per_second"], record["time_share"] = clock.lap()
                log.write(record)
                display.show(record)
                recent = []
            if saved:
                with clock("checkpoint"):
                    checkpoints.save(step, state, value)
            display.advance(step)
        with clock("checkpoint"):
            checkpoints.wait()
        told = clock.summary()
        if told is not None:
            say(told)
        if keep == "best":
            found = checkpoints.best()
            if found is None:
                raise UserError(
                    f"no checkpoint in {checkpoints.directory} was measured by {best}; keep 'last'"
                )
            state = checkpoints.restore_step(found[0], state)
        return jax.device_put(trained(state), mesh.devices.flat[0])


def evaluator(
    loss: Loss, place: Callable[[Batch], Batch] = lambda batch: jax.tree.map(jnp.asarray, batch)
) -> Callable[[Any, Any, Sequence[Batch]], dict[str, float]]:
    """A function (params, target_params, batches) -> the means of loss and metrics over the batches, by their weights.

    ``place`` moves a batch to its devices.
    """

    @jax.jit
    def measure(params, target_params, batch, key):
        value, metrics = loss(params, target_params, batch, key)
        return {"loss": value, **metrics}

    def evaluate(params, target_params, batches):
        keys = jax.random.split(jax.random.key(0), len(batches))  # the same for every evaluation
        pairs = zip(batches, keys, strict=True)
        return _mean(
            jax.device_get(
                [measure(params, target_params, place(batch), key) for batch, key in pairs]
            )
        )

    return evaluate


def _mean(records: Sequence[dict]) -> dict[str, float]:
    """Means over the records, by their weights where they have some."""
    weights = [float(record.get("weight", 1.0)) for record in records]
    weights = weights if sum(weights) else None
    names = [name for name in records[0] if name != "weight"]
    return {
        name: float(np.average([record[name] for record in records], weights=weights))
        for name in names
    }


def _rows(batch: Batch) -> int:
    return len(batch.tokens)


def _check_rows(rows: int, accumulate: int, devices: int) -> None:
    if rows % (accumulate * devices):
        parts = [
            f"{n} {what}"
            for n, what in ((accumulate, "parts (accumulate)"), (devices, "devices"))
            if n > 1
        ]
        told = f"a batch of {rows} rows cannot be divided among {' on '.join(parts)}"
        raise UserError(f"{told}; take a multiple of {accumulate * devices}")


def _check(accumulate: int, ema: float, precision: str, keep: str, **counts: int) -> None:
    for name, value in {**counts, "accumulate": accumulate}.items():
        if value < 1:
            name = (
                name
                if name in ("steps", "accumulate")
                else f"{name.replace('evaluate', 'eval')}_every"
            )
            raise UserError(f"config.train.{name} is {value}; it must be at least 1")
    if not 0 <= ema < 1:
        raise UserError(f"config.train.ema is {ema}; it must be at least 0 (off) and below 1")
    for name, value, choices in (
        ("precision", precision, update.PRECISIONS),
        ("keep", keep, ("last", "best")),
    ):
        if value not in choices:
            raise UserError(
                f"config.train.{name} is {value!r}; it must be {choices[0]!r} or {choices[1]!r}"
            )


def _check_finite(values: dict[str, Any], step: int, checkpoints: Checkpoints) -> None:
    for name, value in sorted(
        values.items(), key=lambda item: "loss" not in item[0]
    ):  # name the cause first
        if not np.isfinite(value):
            good = checkpoints.latest()
            kept = (
                "there is no checkpoint yet"
                if good is None
                else f"the last good checkpoint is step {good}"
            )
            raise UserError(f"{name} is {value} at step {step}; {kept}; lower the learning rate")
