"""Boost-tuning: a draft model learns what earlier draft models get wrong.

SpecInfer (Miao et al. 2024, 2305.09781, section 3): several small models are trained one after the
other, each on the tokens that none of the models before it predicts, so that together they cover
more of the target than copies of one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import lm
from specjax.train.objectives import Loss
from specjax.types import LM, Batch


def boosted(loss: Loss, earlier: Sequence[LM]) -> Loss:
    """The loss over the labels that no earlier model predicts.

    ``target_params`` are {"target": those of the loss, "earlier": those of the models}. A model
    predicts a label if it gives it the highest probability. Further metric: "missed", the share of
    labels that are left.
    """

    def left(params: Any, target_params: Any, batch: Batch, key: jax.Array):
        known = predicted(earlier, target_params["earlier"], batch)
        labelled = batch.labelled
        if labelled is None:
            labelled = jnp.ones(batch.tokens.shape, bool)
        # The first token is never a label.
        open_ = labelled.at[:, 1:].set(labelled[:, 1:] & ~known)
        own = batch.replace(labelled=open_)
        value, metrics = loss(params, target_params["target"], own, key)
        total = jnp.maximum(labelled[:, 1:].sum(), 1)
        return value, {**metrics, "missed": open_[:, 1:].sum() / total}

    return left


def predicted(models: Sequence[LM], params: Sequence[Any], batch: Batch) -> jax.Array:
    """bool[B,T]: labels to which one of the models gives the highest probability."""
    segments = None if batch.segments is None else batch.segments[:, :-1]
    found = jnp.zeros(batch.tokens[:, 1:].shape, bool)
    for model, own in zip(models, params, strict=True):
        logits = lm.forward(model, own, batch.tokens[:, :-1], segments).logits
        found |= jnp.argmax(logits, -1) == batch.tokens[:, 1:]
    return jax.lax.stop_gradient(found)
