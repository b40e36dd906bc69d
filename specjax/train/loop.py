"""The training loop: one compiled step, held-out evaluation, metrics, checkpoints, and a resume that changes nothing.

Everything random is a function of the seed and the step, so a run that was killed and started again ends with the very
same parameters as one that was not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.errors import UserError
from specjax.train.checkpoint import Checkpoints
from specjax.train.objectives import Loss


class Source(Protocol):
    """Where batches come from: a pure function of the step (counted from 0)."""

    def batch(self, step: int) -> np.ndarray: ...  # i32[B,T+1]


class Optimiser(NamedTuple):
    """A gradient transformation, and the learning rate it uses (for the log)."""

    transform: optax.GradientTransformation
    schedule: Callable[[Any], Any]  # step -> learning rate


def optimiser(
    name: str,
    *,
    steps: int,
    learning_rate: float,
    adam_learning_rate: float | None = None,
    warmup: float = 0.05,
    final: float = 0.1,
    weight_decay: float = 0.01,
    clip: float = 1.0,
) -> Optimiser:
    """The optimiser called "adamw" or "muon", with warm-up, cosine decay, and the gradient clipped by its global norm.

    ``warmup`` is a fraction of the steps, ``final`` one of the learning rate. Norm scales and biases are not decayed.
    Muon (Jordan 2024, kellerjordan.github.io/posts/muon) takes the matrices inside the layers, AdamW at
    ``adam_learning_rate`` the embeddings, the head and the vectors. Raises ``UserError`` for another name.
    """

    def cosine(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, int(warmup * steps), steps, final * peak)

    schedule = cosine(learning_rate)
    if name == "adamw":
        transform = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_decayed)
    elif name == "muon":
        transform = optax.contrib.muon(
            schedule,
            # Three steps after AOL scaling come close to the usual five, and the steps are a third of the cost here.
            ns_steps=3,
            preconditioning="aol",
            beta=0.9,  # 0.95 is for longer runs
            weight_decay=weight_decay,
            adam_b2=0.95,
            adam_learning_rate=cosine(adam_learning_rate or learning_rate),
            muon_weight_dimension_numbers=_hidden_matrices,
        )
    else:
        raise UserError(f"config.optimiser.name is {name!r}; it must be 'adamw' or 'muon'")
    return Optimiser(optax.chain(optax.clip_by_global_norm(clip), transform), schedule)


def _decayed(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _hidden_matrices(params: Any) -> Any:
    def spec(path, leaf):
        names = [str(entry.key) for entry in path]
        hidden = leaf.ndim == 2 and names[-1] == "kernel" and names[0] != "head"
        return optax.contrib.MuonDimensionNumbers() if hidden else None

    return jax.tree_util.tree_map_with_path(spec, params)


def train(
    loss: Loss,
    params: Any,
    target_params: Any,
    batches: Source,
    *,
    optimiser: Optimiser,
    steps: int,
    workdir: str | Path,
    eval_batches: Sequence[np.ndarray] = (),
    eval_every: int = 100,
    checkpoint_every: int = 100,
    log_every: int = 10,
    config: dict | None = None,
    seed: int = 0,
) -> Any:
    """Minimises ``loss`` over ``steps`` batches and gives the parameters; resumes from ``workdir/checkpoints``.

    ``metrics.jsonl`` gets one line a logged step: means since the last one, held-out values as ``heldout_*``. ``config``
    (plain JSON) is what a resumed run must share with the run before. Raises ``UserError`` when it does not, and when
    the loss or the gradient is no longer finite.
    """
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    key, evaluate = jax.random.key(seed), evaluator(loss)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, target_params, batch, key):
        objective = jax.value_and_grad(loss, has_aux=True)
        key = jax.random.fold_in(key, state["step"])
        (value, metrics), grads = objective(state["params"], target_params, batch, key)
        updates, opt_state = optimiser.transform.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        state = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return state, {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}

    # A copy: the step donates its state, and the caller keeps what it passed in.
    params = jax.tree.map(jnp.copy, params)
    state = {"params": params, "opt_state": optimiser.transform.init(params), "step": jnp.int32(0)}
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", config or {}, _say))
        found = checkpoints.restore(state)
        if found is not None:
            state = found[1]
            _say(f"resuming from step {found[0]} of {steps} in {workdir}")
        start = int(state["step"])
        log = stack.enter_context(_open_log(workdir / "metrics.jsonl", start))
        display = stack.enter_context(_Display(start, steps))
        recent: list[dict] = []  # stays on the device until somebody looks: no synchronisation in between
        tokens, since = 0, time.perf_counter()
        for step in range(start + 1, steps + 1):
            batch = jnp.asarray(batches.batch(step - 1))
            state, measured = update(state, target_params, batch, key)
            recent.append(measured)
            tokens += batch[:, 1:].size
            if step == start + 1:  # this one was compilation: not counted
                jax.block_until_ready(measured)
                tokens, since = 0, time.perf_counter()
            due = [step == steps or step % every == 0 for every in (log_every, eval_every, checkpoint_every)]
            if any(due):
                recent = jax.device_get(recent)
                for at, values in enumerate(recent, step - len(recent) + 1):
                    _check_finite(values, at, checkpoints)
            paused = time.perf_counter()
            if due[0] or due[1]:
                record = {"step": step, **_mean(recent), "lr": float(optimiser.schedule(step - 1))}
                record["tokens_per_second"] = tokens / (paused - since) if tokens else None
                if due[1] and eval_batches:
                    held_out = evaluate(state["params"], target_params, eval_batches)
                    held_out = {f"heldout_{name}": value for name, value in held_out.items()}
                    _check_finite(held_out, step, checkpoints)
                    record |= held_out
                log.write(json.dumps(record) + "\n")
                log.flush()
                display.show(record)
                recent, tokens, since = [], 0, paused
            if due[2]:
                checkpoints.save(step, state)
            since += time.perf_counter() - paused  # evaluating and saving are not training
            display.advance(step)
    return state["params"]


def evaluator(loss: Loss) -> Callable[[Any, Any, Sequence[np.ndarray]], dict[str, float]]:
    """A function (params, target_params, batches) -> the means of loss and metrics over the batches."""

    @jax.jit
    def measure(params, target_params, batch, key):
        value, metrics = loss(params, target_params, batch, key)
        return {"loss": value, **metrics}

    def evaluate(params, target_params, batches):
        keys = jax.random.split(jax.random.key(0), len(batches))  # the same for every evaluation
        pairs = zip(batches, keys, strict=True)
        return _mean(jax.device_get([measure(params, target_params, jnp.asarray(b), key) for b, key in pairs]))

    return evaluate


def _mean(records: Sequence[dict]) -> dict[str, float]:
    return {name: float(np.mean([record[name] for record in records])) for name in records[0]}


def _check_finite(values: dict, step: int, checkpoints: Checkpoints) -> None:
    for name, value in sorted(values.items(), key=lambda item: "loss" not in item[0]):  # name the cause first
        if not np.isfinite(value):
            good = checkpoints.latest()
            kept = "there is no checkpoint yet" if good is None else f"the last good checkpoint is step {good}"
            raise UserError(f"{name} is {value} at step {step}; {kept}; lower the learning rate")


def _open_log(path: Path, start: int):
    """The log, opened for appending, without what a killed run wrote after its last checkpoint (step ``start``)."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            if json.loads(line)["step"] <= start:
                kept.append(line + "\n")
        except ValueError:
            continue  # half a line: the run was killed while writing it
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)
    return open(path, "a", encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Display:
    """A progress bar with loss and remaining time on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, start: int, steps: int):
        console = Console(stderr=True)
        self._steps, self._first, self._began, self._said = steps, start, time.monotonic(), -10.0
        self._bar = None
        if console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[told]}"), console=console)
            self._task = self._bar.add_task("", total=steps, completed=start, told="")

    def __enter__(self) -> _Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, step: int) -> None:
        """``step`` is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show(self, record: dict) -> None:
        """Tells what was logged."""
        parts = [f"{name} {record[name]:.3f}" for name in ("loss", "heldout_loss", "heldout_alpha") if name in record]
        if record["tokens_per_second"]:
            parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        now, step = time.monotonic(), record["step"]
        if self._bar is not None:
            self._bar.update(self._task, told="  ".join(parts))
        elif now - self._said >= 10 or step == self._steps:
            left = (now - self._began) / (step - self._first) * (self._steps - step)
            _say("  ".join([f"step {step}/{self._steps}", *parts, f"{left:.0f} s left"]))
            self._said = now
