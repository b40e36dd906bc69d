"""The law of the target's text, by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.models import lm
from specjax.types import LM


def sequence_law(model: LM, params, prompt: Sequence[int], steps: int, **settings) -> np.ndarray:
    """The exact law of the next ``steps`` tokens after ``prompt``, for any small vocabulary.

    ``settings`` are those of ``sampling.make_sampling``. Returns float64[V,...,V], ``steps`` axes.
    """
    vocab = model.vocab_size
    continuations = list(itertools.product(range(vocab), repeat=steps - 1)) or [()]
    tokens = jnp.asarray([list(prompt) + list(c) for c in continuations], jnp.int32)
    logits = lm.forward(model, params, tokens).logits[:, len(prompt) - 1 :]
    # Without jit: lax.cond would be compiled again in every call.
    with jax.disable_jit():
        probs = sampling.to_probs(logits, sampling.make_sampling(len(continuations), **settings))
    probs = np.asarray(probs, np.float64)
    joint = np.ones((len(continuations), 1))
    for row, continuation in enumerate(continuations):
        for place, token in enumerate(continuation):
            joint[row] *= probs[row, place, token]
    return (joint * probs[:, -1]).reshape((vocab,) * steps)
