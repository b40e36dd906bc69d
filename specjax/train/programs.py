"""The compiled functions of a training run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from specjax.train import update
from specjax.train.evaluate import Evaluate, evaluator
from specjax.train.objectives import Loss
from specjax.train.optimise import Optimiser
from specjax.train.placement import Placement
from specjax.train.settings import Settings
from specjax.types import Batch

# (params, target_params, batch, key) -> the batch to train on instead.
Rewrite = Callable[[Any, Any, Batch, jax.Array], Batch]


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
    stored: dict[str, Any],
) -> Programs:
    """The programs of a run; they are compiled at their first call.

    ``held_out_loss`` is evaluated; None: ``loss``. ``stored`` has the shardings of the state.
    """
    # Cast first: parameters are gathered in the precision in which they are used.
    evaluated = placement.gathering(held_out_loss or loss)
    evaluated = update.in_precision(evaluated, settings.precision)
    loss = update.in_precision(placement.gathering(loss), settings.precision)
    if rewrite is not None:
        rewrite = update.in_precision(placement.gathering(rewrite), settings.precision)
        rewrite = jax.jit(rewrite, out_shardings=placement.rows)
    step = update.step(loss, optimiser, settings.accumulate, settings.ema)
    advance = jax.jit(step, donate_argnums=0, out_shardings=(stored, placement.everywhere))
    averaged = update.averaged
    if settings.ema:
        averaged = jax.jit(
            functools.partial(averaged, ema=settings.ema), out_shardings=stored["params"]
        )
    evaluate = evaluator(evaluated, placement.batch, placement.everywhere)
    return Programs(rewrite, advance, averaged, evaluate, optimiser.schedule)
