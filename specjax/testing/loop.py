"""Rounds from the host, and the law of the compiled loop's outputs, by counting.

Counting detects what enumeration cannot: errors in the noise, the caches and the compiled program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize
import scipy.stats

from specjax import decode, rng, sampling, step
from specjax.testing import laws, verdicts
from specjax.theory import statistics
from specjax.types import LM, Accept, DecodeState, Draft, Drafter, ModelParams


class Fit(NamedTuple):
    """The fit of counts to a law."""

    p_value: float
    detectable: float  # a total variation that is missed with probability below 0.01
    counts: np.ndarray  # i64[V,...,V] how many rows gave each continuation


def begin(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    new,
    seed: int,
    ids=None,
    width: int | None = None,
    max_len: int | None = None,
    **settings,
) -> DecodeState:
    """The state before the first round.

    ``new`` tokens per row (one number or one per row); ``ids`` are the numbers of the rows;
    ``width`` is that of the packed prompts, by default their longest length, and ``max_len`` that
    of the buffers, by default the width and the most new tokens.
    """
    packed, lengths = decode.pack_prompts(prompts, width)
    new = np.broadcast_to(np.asarray(new, np.int32), lengths.shape)
    keys = rng.row_keys(seed, len(prompts) if ids is None else ids)
    rows = sampling.make_sampling(len(prompts), **settings)
    size = max_len or int(packed.shape[1] + new.max())
    return decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        keys,
        max_len=size,
        limit=lengths + new,
        sampling=rows,
    )


def propose(drafter: Drafter, params: ModelParams, state: DecodeState) -> Draft:
    """The draft of the next round, as the drafter gives it."""
    context = step.context_of(state)
    return drafter.propose(params, step.keys_of(drafter, state), context, state.draft)[0]


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
    """Chi-square of what ``rows`` rows write in the compiled loop, with its power.

    The texts of ``steps`` tokens are counted against the target's exact law. With ``steps`` >
    drafter.longest + 1 no single round can emit them all, so noise that is reused between rounds
    changes their joint law. Raises WrongVerdict for a verdict with a mistake.
    """
    law = laws.sequence_law(target, params.target, prompt, steps, **settings)
    marked, marks = verdicts.marked(rule), verdicts.marks(target.vocab_size)
    state = begin(target, drafter, params, [list(prompt)] * rows, steps, seed, **settings)
    pair = (target, drafter, marked, params)
    state, _ = decode.generate(*pair, state, max_steps=steps, eos_id=marks)
    decode.check(state)
    tokens = np.asarray(state.tokens[:, len(prompt) : len(prompt) + steps])
    wrong = verdicts.marked_rows(tokens, target.vocab_size)
    if len(wrong):
        raise verdicts.WrongVerdict(
            f"in {len(wrong)} rows the rule gave {verdicts.MISTAKES[wrong[0]]}"
        )
    texts = np.ravel_multi_index(tuple(tokens.T), law.shape)
    counts = np.bincount(texts, minlength=law.size).reshape(law.shape)
    return Fit(statistics.chi_square(counts, law)[2], detectable(law, rows), counts)


def detectable(law: np.ndarray, rows: int, level: float = 1e-3, missed: float = 0.01) -> float:
    """The power of the chi-square test, as a total variation.

    *Any* deviation of this size or more from ``law`` gives p < ``level`` with probability
    1 - ``missed``. The noncentrality of Pearson's test is ``rows * sum(d^2 / law)``, at least
    ``rows * (sum |d|)^2 = 4 rows TV^2`` by Cauchy-Schwarz, so the evenly spread deviation is the
    hardest to detect. (Rare cells, which the test pools, are not counted here.)
    """
    freedom = max(int((np.asarray(law).ravel() * rows >= 5).sum()) - 1, 1)
    critical = scipy.stats.chi2.isf(level, freedom)
    highest = critical + 100 * np.sqrt(freedom) + 1000
    found: Any = scipy.optimize.brentq(
        lambda x: scipy.stats.ncx2.sf(critical, freedom, x) - (1 - missed), 0, highest
    )
    return float(np.sqrt(found / (4 * rows)))
