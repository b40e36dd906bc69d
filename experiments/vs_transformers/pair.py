"""A target and a draft model that agree often and not always, without training: both know the same walk over tokens.

``SPOKEN`` tokens, taken at random from the vocabulary, form one cycle; each has one successor. The row of the LM head for a
token is the embedding of its predecessor, so that a model says the successor where its layers leave the embedding of the last
token in sight. The layers are random and hide it: the target's so much that every few tokens it goes elsewhere, to
another spoken token, by the whole context; the draft's less. Tokens that are not spoken have a low logit
everywhere, by way of the last norm's bias. A prompt is once round the cycle and some more, so that what the target
says, where it follows the walk, is also a continuation that prompt lookup finds.

This is good for decoding at an equal acceptance with real shapes and costs. It says nothing about the acceptance that
trained pairs reach.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import lm
from specjax.models.transformer import TransformerConfig

SPOKEN = 80
DISTURBED = 3.0  # random layers at their usual scale change little; the weights of both models are three times as large
SIGNALS = (
    2.15,
    0.4,
)  # found by trying: at the shapes of run.py about three greedy tokens in four follow the draft
GAIN = (
    2.5  # so that the target gives the successor about three quarters of its mass at temperature 1
)
SILENT = -24.0  # the logit of a token that is not spoken


class Model(NamedTuple):
    """A shape and its parameters."""

    config: TransformerConfig
    params: dict


def walker(config: TransformerConfig, walk: np.ndarray, signal: float, seed: int) -> Model:
    """A model that follows ``walk`` i32[SPOKEN] as far as its layers let it.

    Args:
        config: any GPT-2 shape with an LM head of its own.
        walk: the cycle of tokens.
        signal: standard deviation of the embeddings; the layers add about the same whatever it is.
    """
    params = lm.init_params(config, jax.random.key(seed))
    noise = np.random.default_rng(seed)
    width = config.hidden_size
    embedding = noise.standard_normal((config.vocab_size, width), np.float32)
    up = np.ones(
        width, np.float32
    )  # what the last norm adds to every feature; it has removed their mean before
    head = np.broadcast_to(SILENT / width * up, embedding.shape).copy()
    before = embedding[walk] - embedding[walk].mean(-1, keepdims=True)
    head[np.roll(walk, -1)] = GAIN / np.sqrt(width) * before
    params["layers"] = jax.tree.map(lambda x: DISTURBED * x if x.ndim > 1 else x, params["layers"])
    params["embed"]["embedding"] = jnp.asarray(signal * embedding)
    params["norm"]["bias"] = jnp.asarray(up)
    params["head"]["kernel"] = jnp.asarray(head.T)
    return Model(config, params)


def make(
    target: TransformerConfig,
    draft: TransformerConfig,
    prompts: int,
    signals: tuple[float, float] = SIGNALS,
):
    """(target, draft, prompts): the pair, and token lists of ragged lengths."""
    noise = np.random.default_rng(7)
    walk = noise.choice(target.vocab_size, SPOKEN, replace=False)
    texts = []
    for number in range(prompts):
        length = SPOKEN + 7 * (number + 1)
        texts.append(np.resize(np.roll(walk, -int(noise.integers(SPOKEN))), length).tolist())
    shapes = [dataclasses.replace(config, tie_embeddings=False) for config in (target, draft)]
    pair = [
        walker(shape, walk, signal, seed)
        for seed, (shape, signal) in enumerate(zip(shapes, signals, strict=True), 1)
    ]
    return pair[0], pair[1], texts
