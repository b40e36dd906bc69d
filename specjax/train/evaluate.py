"""Means of loss and metrics: over held-out batches, and over the steps since the last record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.train.objectives import Loss
from specjax.types import Batch

# (params, target_params, batches) -> means.
Evaluate = Callable[[Any, Any, Sequence[Batch]], dict[str, float]]


def evaluator(
    loss: Loss, place: Callable[[Batch], Batch] = lambda batch: jax.tree.map(jnp.asarray, batch)
) -> Evaluate:
    """A function that gives the means of loss and metrics over batches; labels weigh equally.

    ``place`` moves a batch to its devices. Every evaluation uses the same random keys.
    """

    @jax.jit
    def measure(params, target_params, batch, key):
        value, metrics = loss(params, target_params, batch, key)
        return {"loss": value, **metrics}

    def evaluate(params, target_params, batches):
        keys = jax.random.split(jax.random.key(0), len(batches))
        pairs = zip(batches, keys, strict=True)
        return mean(
            jax.device_get(
                [measure(params, target_params, place(batch), key) for batch, key in pairs]
            )
        )

    return evaluate


def mean(records: Sequence[dict]) -> dict[str, float]:
    """Means over the records, weighted by their value "weight" where they have one."""
    weights = [float(record.get("weight", 1.0)) for record in records]
    weights = weights if sum(weights) else None
    names = [name for name in records[0] if name != "weight"]
    return {
        name: float(np.average([record[name] for record in records], weights=weights))
        for name in names
    }
