"""A target and a draft model that often agree, without training: both follow one cycle of tokens.

``CYCLE`` tokens, taken at random from the vocabulary, form a cycle: each has one successor. The row
of the LM head for a token is the embedding of its predecessor, so a model predicts the successor if
its layers leave the embedding of the last token visible. The layers are random and hide it: those
of the target so much that every few tokens it continues with another token of the cycle, which
depends on the whole context; those of the draft model less. Tokens outside the cycle have a low
logit everywhere, by way of the last norm's bias. A prompt is the whole cycle and some more tokens,
so where the target follows the cycle, prompt lookup finds its continuation.

This gives equal acceptance on both sides with real shapes and costs. It does not measure the
acceptance that trained pairs reach.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig

CYCLE = 80
# Factor of the weights of the layers: random layers at their usual scale change little.
LAYERS = 3.0
# Of target and draft, tuned: at the shapes of run.py about three of four greedy tokens agree.
SIGNALS = (2.15, 0.4)
# The target gives the successor about three quarters of the probability at temperature 1.
GAIN = 2.5
OUTSIDE = -24.0  # the logit of a token outside the cycle


class Model(NamedTuple):
    """A shape and its parameters."""

    config: TransformerConfig
    params: dict


def make_model(config: TransformerConfig, cycle: np.ndarray, signal: float, seed: int) -> Model:
    """A model that predicts the successors in ``cycle`` i32[CYCLE], apart from what its layers add.

    Args:
        config: a GPT-2 shape with untied embeddings.
        cycle: the tokens in order.
        signal: standard deviation of the embeddings; what the layers add does not depend on it.
        seed: of the random weights.
    """
    params = lm.init_params(config, jax.random.key(seed))
    noise = np.random.default_rng(seed)
    width = config.hidden_size
    embedding = noise.standard_normal((config.vocab_size, width), np.float32)
    # The last norm has removed the mean of the features; its bias adds this to each of them.
    bias = np.ones(width, np.float32)
    head = np.broadcast_to(OUTSIDE / width * bias, embedding.shape).copy()
    centred = embedding[cycle] - embedding[cycle].mean(-1, keepdims=True)
    head[np.roll(cycle, -1)] = GAIN / np.sqrt(width) * centred
    params["layers"] = jax.tree.map(lambda x: LAYERS * x if x.ndim > 1 else x, params["layers"])
    params["embed"]["embedding"] = jnp.asarray(signal * embedding)
    params["norm"]["bias"] = jnp.asarray(bias)
    params["head"]["kernel"] = jnp.asarray(head.T)
    return Model(config, params)


def make(
    target: TransformerConfig,
    draft: TransformerConfig,
    prompts: int,
    signals: tuple[float, float] = SIGNALS,
) -> tuple[Model, Model, list[list[int]]]:
    """(target, draft model, token lists of different lengths)."""
    noise = np.random.default_rng(7)
    cycle = noise.choice(target.vocab_size, CYCLE, replace=False)
    texts = []
    for number in range(prompts):
        length = CYCLE + 7 * (number + 1)
        texts.append(np.resize(np.roll(cycle, -int(noise.integers(CYCLE))), length).tolist())
    shapes = [dataclasses.replace(config, tie_embeddings=False) for config in (target, draft)]
    models = [
        make_model(shape, cycle, signal, seed)
        for seed, (shape, signal) in enumerate(zip(shapes, signals, strict=True), 1)
    ]
    return models[0], models[1], texts
