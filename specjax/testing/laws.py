"""The law of the target's text, by enumeration."""

from __future__ import annotations

import functools
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
    rows = sampling.make_sampling(len(continuations), **settings)
    probs = np.asarray(_probs(model, params, tokens, rows), np.float64)[:, len(prompt) - 1 :]
    joint = np.ones((len(continuations), 1))
    for row, continuation in enumerate(continuations):
        for place, token in enumerate(continuation):
            joint[row] *= probs[row, place, token]
    return (joint * probs[:, -1]).reshape((vocab,) * steps)


@functools.partial(jax.jit, static_argnums=0)
def _probs(model: LM, params, tokens: jax.Array, rows: sampling.Sampling) -> jax.Array:
    """f[B,T,V]: the adjusted probabilities after each token."""
    return sampling.to_probs(lm.forward(model, params, tokens).logits, rows)
