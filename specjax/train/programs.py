"""The compiled functions of a training run, and where its arrays are stored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.train import update
from specjax.train.evaluate import Evaluate, evaluator
from specjax.train.objectives import Loss
from specjax.train.optimise import Optimiser
from specjax.train.settings import Settings
from specjax.types import Batch

# (params, target_params, batch, key) -> the batch to train on instead.
Rewrite = Callable[[Any, Any, Batch, jax.Array], Batch]


class Placement(NamedTuple):
    """Where arrays are stored."""

    everywhere: NamedSharding  # a copy on every device
    rows: NamedSharding  # the rows divided among the devices
    devices: int
    first: Any  # jax.Device

    def batch(self, batch: Batch) -> Batch:
        """A held-out batch on the devices: divided if its rows can be divided."""
        divisible = len(batch.tokens) % self.devices == 0
        return jax.device_put(batch, self.rows if divisible else self.everywhere)


def place(devices: Sequence[Any] | None) -> Placement:
    """The placement for these devices (jax.Device); None = all local ones."""
    mesh = Mesh(np.asarray(devices or jax.local_devices()), ("data",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return Placement(everywhere, rows, mesh.size, mesh.devices.flat[0])


class Programs(NamedTuple):
    """The functions of a step, compiled; and the learning rate."""

    rewrite: Rewrite | None
    advance: Callable[..., tuple[Any, dict[str, jax.Array]]]  # donates the state
    averaged: Callable[[Any], Any]  # state -> the parameters that are evaluated and returned
    evaluate: Evaluate
    rate: Callable[[int], Any]


def compile_programs(
    loss: Loss,
    held_out_loss: Loss | None,
    rewrite: Rewrite | None,
    optimiser: Optimiser,
    settings: Settings,
    placement: Placement,
) -> Programs:
    """The programs of a run; they are compiled at their first call.

    ``held_out_loss`` is evaluated; None: ``loss``.
    """
    evaluated = update.in_precision(held_out_loss or loss, settings.precision)
    loss = update.in_precision(loss, settings.precision)
    if rewrite is not None:
        rewrite = update.in_precision(rewrite, settings.precision)
        rewrite = jax.jit(rewrite, out_shardings=placement.rows)
    step = update.step(loss, optimiser, settings.accumulate, settings.ema)
    advance = jax.jit(step, donate_argnums=0, out_shardings=placement.everywhere)
    averaged = update.averaged
    if settings.ema:
        averaged = jax.jit(functools.partial(averaged, ema=settings.ema))
    return Programs(
        rewrite, advance, averaged, evaluator(evaluated, placement.batch), optimiser.schedule
    )
