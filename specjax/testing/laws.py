"""Laws of token sequences: by enumeration, and against counts."""

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


def chi_square(
    counts: np.ndarray, law: np.ndarray, *, least: float = 5.0
) -> tuple[float, int, float]:
    """Pearson's test of observed counts against a law: (statistic, degrees of freedom, p-value).

    Cells that expect fewer than ``least`` are pooled; an observation where the law is 0 gives p = 0.
    """
    counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    if counts[law <= 0].sum() > 0:
        return float("inf"), 1, 0.0
    expected = law / law.sum() * counts.sum()
    small = expected < least
    pooled_counts = np.append(counts[~small], counts[small].sum())
    pooled = np.append(expected[~small], expected[small].sum())
    keep = pooled > 0
    statistic = float((((pooled_counts - pooled) ** 2)[keep] / pooled[keep]).sum())
    freedom = int(keep.sum()) - 1
    return statistic, freedom, chi_square_tail(statistic, freedom)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with ``freedom`` degrees of freedom > ``statistic``)."""
    if freedom < 1:
        return 1.0
    return float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2))


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Half the sum of absolute differences."""
    return float(0.5 * np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).sum())
