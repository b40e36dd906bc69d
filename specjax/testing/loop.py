"""The law of the whole compiled loop, by counting: what enumeration cannot see (noise, caches, compilation) shows here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.stats

from specjax import decode, rng, sampling
from specjax.testing import laws
from specjax.theory import statistics
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams

STEPS = 3  # rounds compiled into one call of ``generate``


class Fit(NamedTuple):
    """How well counts fit a law."""

    p_value: float
    detectable: float  # total variation that would have been missed with probability below 0.01


def begin(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    new,
    seed: int,
    ids=None,
    **settings,
) -> DecodeState:
    """The state before the first round: ``new`` tokens per row (a number, or one each), rows numbered ``ids``."""
    packed, lengths = decode.pack_prompts(prompts)
    new = jnp.broadcast_to(jnp.asarray(new, jnp.int32), lengths.shape)
    return decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(seed, list(range(len(prompts))) if ids is None else ids),
        max_len=int(packed.shape[1] + new.max()),
        limit=lengths + new,
        sampling=sampling.make_sampling(len(prompts), **settings),
    )


def finish(
    target: LM, drafter: Drafter, rule: Accept, params: ModelParams, state: DecodeState, eos_id=None
) -> DecodeState:
    """Runs the compiled loop to the end, a few rounds at a time: one program, whatever the length."""
    while not bool(state.done.all()):
        state, _ = decode.generate(
            target, drafter, rule, params, state, max_steps=STEPS, eos_id=eos_id
        )
    decode.check(state)
    return state


def counts(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    prompt: Sequence[int],
    steps: int,
    rows: int,
    seed: int = 0,
    **settings,
) -> np.ndarray:
    """i64[V,...,V], ``steps`` axes: how often each continuation came out of ``rows`` rows.

    With ``steps`` > drafter.longest + 1 no round can emit them all: noise reused between rounds changes their joint law.
    """
    state = begin(target, drafter, params, [list(prompt)] * rows, steps, seed, **settings)
    state = finish(target, drafter, rule, params, state)
    tokens = np.asarray(state.tokens[:, len(prompt) : len(prompt) + steps])
    shape = (target.vocab_size,) * steps
    return np.bincount(
        np.ravel_multi_index(tuple(tokens.T), shape), minlength=int(np.prod(shape))
    ).reshape(shape)


def loop_fit(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    prompt: Sequence[int],
    steps: int,
    rows: int,
    seed: int = 0,
    **settings,
) -> Fit:
    """Chi-square of ``counts`` against the target's exact law, with its power."""
    law = laws.sequence_law(target, params.target, prompt, steps, **settings)
    seen = counts(target, drafter, rule, params, prompt, steps, rows, seed, **settings)
    return Fit(statistics.chi_square(seen, law)[2], detectable(law, rows))


def detectable(law: np.ndarray, rows: int, level: float = 1e-3, missed: float = 0.01) -> float:
    """The total variation above which *any* deviation from ``law`` gives p < ``level`` with probability 1 - ``missed``.

    The noncentrality of Pearson's test is rows * sum(d^2 / law) >= rows * (sum |d|)^2 = 4 rows TV^2, by Cauchy-Schwarz, so
    the evenly spread deviation is the hardest to see. (Cells that are pooled for being rare are not counted here.)
    """
    freedom = max(int((np.asarray(law).ravel() * rows >= 5).sum()) - 1, 1)
    critical = scipy.stats.chi2.isf(level, freedom)
    low, high = 0.0, float(critical + 100 * np.sqrt(freedom) + 1000)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if scipy.stats.ncx2.sf(critical, freedom, middle) > 1 - missed
            else (middle, high)
        )
    return float(np.sqrt(high / (4 * rows)))
