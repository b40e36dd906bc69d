"""The law of token sequences, by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.models import lm
from specjax.types import LM


def sequence_law(model: LM, params, prompt: Sequence[int], steps: int, **settings) -> np.ndarray:
    """The exact law of the next ``steps`` tokens after ``prompt``: float[V,...,V] (``steps`` axes), by enumeration.

    ``settings`` are those of ``sampling.make_sampling``. Works for any model with a small vocabulary.
    """
    vocab = model.vocab_size
    continuations = list(itertools.product(range(vocab), repeat=steps - 1)) or [()]
    tokens = jnp.asarray([list(prompt) + list(c) for c in continuations], jnp.int32)
    logits = lm.forward(model, params, tokens).logits[:, len(prompt) - 1 :]
    laws = np.asarray(
        sampling.to_probs(logits, sampling.make_sampling(len(continuations), **settings)),
        np.float64,
    )
    joint = np.ones((len(continuations), 1))
    for row, continuation in enumerate(continuations):
        for place, token in enumerate(continuation):
            joint[row] *= laws[row, place, token]
    return (joint * laws[:, -1]).reshape((vocab,) * steps)
