"""Means of loss and metrics: over held-out batches, and over the steps since the last record."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specjax.train.objectives import Loss
from specjax.types import Batch

# (params, target_params, batches) -> means.
Evaluate = Callable[[Any, Any, Sequence[Batch]], dict[str, float]]


def evaluator(
    loss: Loss, place: Callable[[Batch], Batch] = jax.device_put, everywhere: Any = None
) -> Evaluate:
    """A function that gives the means of loss and metrics over batches; labels weigh equally.

    ``place`` moves a batch to its devices, and ``everywhere`` is the sharding of the values: each
    process reads them. Every evaluation uses the same random keys.
    """

    @functools.partial(jax.jit, out_shardings=everywhere)
    def measure(params, target_params, batch, key):
        value, metrics = loss(params, target_params, batch, key)
        return {"loss": value, **metrics}

    def evaluate(params, target_params, batches):
        keys = jax.random.split(jax.random.key(0), len(batches))
        pairs = zip(batches, keys, strict=True)
        values = [measure(params, target_params, place(batch), key) for batch, key in pairs]
        return mean(jax.device_get(values))

    return evaluate


def mean(records: Sequence[dict]) -> dict[str, float]:
    """Means over the records, weighted by their value "weight" where they have one.

    Where "weight" is a dict, each value has its own weights (equal ones if it is not named). Where
    there are "terms", "loss" is the sum of their means (see ``objectives``). The metrics "scale"
    and "uniform" become "loss_per_token" and "uniform_per_token", quotients of means.
    """
    names = [name for name in records[0] if name not in ("weight", "terms")]
    values = {name: _average(records, name, [record[name] for record in records]) for name in names}
    if "terms" in records[0]:
        terms = [record["terms"] for record in records]
        means = (_average(records, name, [each[name] for each in terms]) for name in terms[0])
        values["loss"] = sum(means)
    scale, uniform = values.pop("scale", None), values.pop("uniform", None)
    # A batch without labels has scale 0.
    divisor = 1.0 if scale is None else scale or 1.0
    if scale is not None:
        values["loss_per_token"] = values.get("heads", values["loss"]) / divisor
    if uniform is not None:
        values["uniform_per_token"] = uniform / divisor
    return values


def labels(records: Sequence[dict]) -> dict[str, float]:
    """How many predictions of all depths a step compares, on average; {} where it is not known."""
    counts = [record["weight"] for record in records if "weight" in record]
    return {"labels": float(np.mean([_compared(each) for each in counts]))} if counts else {}


def _compared(weight: Any) -> float:
    if not isinstance(weight, dict):
        return float(weight)
    depths = [count for name, count in weight.items() if re.fullmatch(r"agreement_\d+", name)]
    return float(sum(depths) if depths else weight.get("loss", max(weight.values(), default=0)))


def _average(records: Sequence[dict], name: str, values: Sequence[Any]) -> float:
    """The mean of the values of the records, with the weights of ``name``."""
    every = [record.get("weight", 1.0) for record in records]
    weights = [float(w.get(name, 1.0) if isinstance(w, dict) else w) for w in every]
    return float(np.average(values, weights=weights if sum(weights) else None))
