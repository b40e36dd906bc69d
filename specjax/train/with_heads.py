"""The loss of a target that is trained together with heads for multi-token prediction.

    L = L_main + (weight / D) * (L_1 + ... + L_D)

L_main is the cross-entropy of the target with the next token, and L_k that of head or module k with
the token k further. DeepSeek-V3 (2412.19437, equations 24 and 25): weight 0.3, later 0.1. Gloeckle
et al. 2024 (2404.19737, equation 2): all losses have the same weight, so the weight is D.

The parameters are {"target", "draft"}. Embeddings, last norm and LM head are the target's, and get
gradients from all terms. The logits of one head at a time are in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import UserError
from specjax.train import objectives
from specjax.train.objectives import Loss
from specjax.types import LM, Drafter, Features


def joint(
    target: LM, drafter: Drafter, heads: int, weight: Stages, steps: int, keys: Mapping[str, Any]
) -> Loss:
    """L, per label of the first depth; metrics as in ``objectives.joint_loss``.

    Each L_k is divided by the number of labels of L_1.

    Args:
        target: the model.
        drafter: its heads or modules, ``Drafter.training``.
        heads: D, how many losses the heads' one is the sum of.
        weight: of the mean over heads; batches without a number have its last value.
        steps: of the run.
        keys: of the heads' loss.
    """
    assert drafter.training is not None and drafter.training.loss is not None
    heads_loss, tapped = drafter.training.loss, drafter.tapped(target)

    def loss(params, target_params, batch, key):
        out = objectives.output_of(tapped, params["target"], batch)
        labels, mask = objectives.labels_of(batch)
        own = objectives.cross_entropy(out.logits, labels, mask)
        # The heads read this pass, so there is one gradient of it.
        given = batch.replace(features=Features(out.hidden, tuple(out.taps)))
        value, metrics = heads_loss(params["draft"], params["target"], given, key, **keys)
        now = weight.values[-1] if batch.step is None else at(weight, batch.step[0], steps)
        count = objectives.count_of(mask, labels)
        return objectives.with_language(value, metrics, now / heads, own, count)

    return loss


def of_target(loss: Loss) -> Loss:
    """L_main alone as the value of a joint loss, with its metrics: for held-out text."""

    def own(params, target_params, batch, key):
        metrics: dict[str, Any] = dict(loss(params, target_params, batch, key)[1])
        del metrics["terms"]
        counts = metrics.pop("weight")
        value = metrics.pop("language")
        return value, {**metrics, "weight": counts | {"loss": counts["language"]}}

    return own


class Stages(NamedTuple):
    """A number that changes during training.

    ``values[i]`` holds from the share ``starts[i]`` of the steps on; the first start is 0."""

    values: tuple[float, ...]
    starts: tuple[float, ...]


def parse(name: str, text: str | float) -> Stages:
    """ "0.3,0.1@0.67": 0.3, and 0.1 from 67 % of the steps on; a number: always that.

    Raises UserError, with the name of the key.
    """
    form = f"{name} is {text!r}; give a value >= 0, and later ones with a share of the steps in "
    form += 'ascending order, such as "0.3,0.1@0.67"'
    if isinstance(text, bool):
        raise UserError(form)
    values, starts = [], []
    for part in str(text).split(","):
        value, at, start = part.partition("@")
        try:
            values.append(float(value))
            starts.append(float(start) if at else 0.0)
        except ValueError:
            raise UserError(form) from None
        if bool(at) != (len(values) > 1):
            raise UserError(form)
    ascending = all(a < b for a, b in itertools.pairwise(starts))
    finite = all(math.isfinite(x) and x >= 0 for x in values)
    if not (ascending and finite and starts[-1] < 1):
        raise UserError(form)
    return Stages(tuple(values), tuple(starts))


def at(stages: Stages, step: jax.Array | int, steps: int) -> jax.Array:
    """f32[]: the value at a step, from 0, of so many steps."""
    value = jnp.float32(stages.values[0])
    for later, start in zip(stages.values[1:], stages.starts[1:], strict=True):
        value = jnp.where(jnp.asarray(step) >= math.ceil(round(start * steps, 9)), later, value)
    return jnp.float32(value)
