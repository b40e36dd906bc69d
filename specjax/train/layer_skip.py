"""LayerSkip: a decoder that learns to exit at every layer (Elhoushi et al. 2024, 2404.16710).

Layer dropout (section 4.1.1) leaves layers out at random, later layers more often, so that early
layers rely less on later ones. The early-exit loss (section 4.1.2) is the cross-entropy of several
layers' outputs, each through the last norm and the head. A curriculum chooses the layers whose exit
is trained in a step. The number of a layer l is from 0 to L - 1, that of a step t from 0 to T - 1.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import declare
from specjax.declare import key
from specjax.errors import UserError
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.train import objectives
from specjax.train.objectives import Loss
from specjax.types import LM


class Settings(declare.Keys, owner="loss."):
    """The keys of the loss; each is the key of ``config.loss`` of that name. Raises UserError."""

    dropout: float = key(
        0.1,
        "probability that the last layer is left out, earlier ones less (p_max); 0: no layer "
        "dropout",
        least=0,
        below=1,
    )
    dropout_schedule: str = key(
        "exponential",
        'from 0 to the full probabilities, or "constant" to continue a trained model',
        choices=("constant", "exponential"),
        needs="dropout",
    )
    exits: float = key(
        0.2,
        "weight of the exits before the last layer (e_scale); 0: only the last layer is trained",
        least=0,
    )
    curriculum: str = key(
        "rotational",
        'exits that a step trains: "rotational" (every rotation-th layer, by turns), "gradual" '
        '(from the last to the first, in half of the steps), or "all"; and always the last layer',
        choices=("rotational", "gradual", "all"),
        needs="exits",
    )
    rotation: int = key(8, "see curriculum", least=1, needs="exits")

    def check(self) -> None:
        if not self.dropout and not self.exits:
            raise UserError(
                "loss.dropout and loss.exits are both 0, which is plain pretraining; leave "
                "config.loss empty, or make one of them positive"
            )
        if self.curriculum != "rotational":
            self.refuse(("rotation",), f"where loss.curriculum is {self.curriculum!r}")


def dropout_rates(settings: Settings, layers: int, step: Any, steps: int) -> jax.Array:
    """f32[L]: the probability that each layer is left out at a step, S(t) D(l) p_max.

    D(l) = exp(l ln 2 / (L - 1)) - 1; S(t) = 1, or exp(t ln 2 / (T - 1)) - 1. Equations 2 and 3.
    """
    depth = np.expm1(np.arange(layers) * math.log(2) / max(layers - 1, 1))
    rates = jnp.asarray(settings.dropout * depth, jnp.float32)
    if settings.dropout_schedule == "constant":
        return rates
    return rates * jnp.expm1(step * math.log(2) / max(steps - 1, 1))


def exit_weights(settings: Settings, layers: int, step: Any, steps: int) -> jax.Array:
    """f32[L]: the weights of the layers' losses at a step; their sum is 1.

    e(l) = e_scale (0 + ... + l) below the last layer, and L - 1 + e_scale (0 + ... + L - 2) for
    the last one; those of the layers that the curriculum chooses, divided by their sum. Equations 6
    and 7. A model of one layer has the weight 1.
    """
    number_ = np.arange(layers)
    size = settings.exits * np.cumsum(number_, dtype=np.float64)
    size[-1] = max(layers - 1, 1) + settings.exits * (layers - 1) * (layers - 2) / 2
    if settings.curriculum == "rotational":
        chosen = number_ % settings.rotation == step % settings.rotation
    elif settings.curriculum == "gradual":
        chosen = 2 * layers * step >= (layers - number_) * steps
    else:
        chosen = np.ones(layers, bool)
    weights = jnp.where(jnp.asarray(chosen) | (number_ == layers - 1), jnp.asarray(size), 0)
    return (weights / weights.sum()).astype(jnp.float32)


@declare.method(Settings)
def layer_skip_loss(
    model: LM, shape: TransformerConfig, steps: int, remat: bool, keys: Settings
) -> Loss:
    """The loss of a decoder, with its shape, in a run of ``steps`` steps; keys as in ``Settings``.

    The weighted sum over layers of the cross-entropy of their exits with the next tokens, in nats
    per label. Metric: ``last``, that of the last layer. ``target_params`` are ignored; ``remat`` as
    in ``lm.from_config``. Raises UserError for values out of range or without effect.
    """
    layers, uniform = shape.num_layers, math.log(shape.vocab_size)
    assert model.unembed is not None and model.inside.last_norm is not None
    unembed, last_norm = model.unembed, model.inside.last_norm

    def loss(params, target_params, batch, key):
        assert batch.step is not None
        step = batch.step[0]
        rates = dropout_rates(keys, layers, step, steps)
        kept = ~jax.random.bernoulli(key, rates, (len(batch.tokens), layers))
        segments = None if batch.segments is None else batch.segments[:, :-1]
        outputs = lm.layers_left_out(shape, params, batch.tokens[:, :-1], kept, segments, remat)
        labels, mask = objectives.labels_of(batch)

        # The logits of one exit at a time: the backward pass computes them again.
        @jax.checkpoint
        def exit_loss(params, x):
            return objectives.cross_entropy(unembed(params, last_norm(params, x)), labels, mask)

        weights = exit_weights(keys, layers, step, steps)
        values = [
            jax.lax.cond(weights[layer] > 0, exit_loss, lambda *_: jnp.zeros(()), params, x)
            for layer, x in enumerate(outputs)
        ]
        total = functools.reduce(jnp.add, map(jnp.multiply, weights, values))
        count = objectives.count_of(mask, labels)
        return total, {"last": values[-1], "uniform": jnp.float32(uniform), "weight": count}

    return loss
