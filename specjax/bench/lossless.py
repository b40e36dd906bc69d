"""Checks that real outputs are those of the target alone.

Greedy outputs are compared token by token. Sampled outputs pass two statistical tests of the
output law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.bench.token_probs import compare
from specjax.theory import statistics
from specjax.types import LM, Drafter, ModelParams

CELLS = 20
MIN_TOKENS = 20 * CELLS  # with fewer the chi-square test is not valid


class Lossless(NamedTuple):
    """The result of a check.

    ``passed`` is None if there are too few tokens to decide, and in a bench if sampled outputs of
    a lossy rule show no difference.
    """

    check: str
    passed: bool | None
    detail: str


def greedy_identity(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> Lossless:
    """Token-by-token equality with plain greedy decoding."""
    same = sum(list(a) == list(b) for a, b in zip(expected, got, strict=True))
    return Lossless("greedy-identity", same == len(expected), f"{same}/{len(expected)} prompts")


def law_check(
    model: LM,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    settings: dict,
    drafter: Drafter | None = None,
    *,
    width: int = 0,
    level: float = 1e-4,
    seed: int = 0,
) -> Lossless:
    """Tests whether sampled outputs follow the target's law, at any vocabulary size.

    Needs only the outputs. Two statistics of each token given its prefix have a known distribution
    if the output law is the target's:

    - The target probability of all more probable tokens, plus a uniform fraction of the token's own
      probability, is uniform and independent between tokens (Rosenblatt 1952). A chi-square test
      over 20 cells detects tokens that are too frequent or too rare.
    - Whether the draft probability (``Drafter.probs``) of the token is above its target probability
      is a coin flip with a known chance: the target probability of all such tokens. The sum of the
      differences is a martingale, tested as a normal z. Such tokens become more or less frequent
      with wrong residuals, with tokens that are drawn again after a match, and with ``Draft.probs``
      that are not the distributions of the draws.

    Tokens of target probability 0 are also counted; more than one in a thousand fails the check.

    It does not detect noise reused between rounds, nor biases below about 3 / sqrt(tokens). The
    exact tests of the rules are the proof; this check covers the real model.

    Args:
        model, params: the target, and the parameters of the pair.
        prompts, outputs: token ids, row by row.
        settings: arguments of ``sampling.make_sampling``.
        drafter: for the second test; without its ``probs`` only the first is made.
        width: as for ``token_probs.compare``.
        level: p-value below which the check fails.
        seed: of the uniform fractions.
    """
    tokens = compare(model, params, prompts, outputs, settings, drafter, width=width)
    total = len(tokens.above)
    if total < MIN_TOKENS:
        return Lossless("law", None, f"{total} tokens are too few to tell, p = -")
    values = tokens.above + np.random.default_rng(seed).random(total) * tokens.tied
    cells = np.clip((values * CELLS).astype(int), 0, CELLS - 1)
    counts = np.bincount(cells, minlength=CELLS)
    p_value = statistics.chi_square(counts, np.full(CELLS, 1 / CELLS))[2]
    chance = tokens.preferred_mass
    variance = (chance * (1 - chance)).sum()
    # Below that the draft probability is hardly ever above the target's: too few to test.
    if variance > 5:
        z = (tokens.preferred - chance).sum() / math.sqrt(variance)
        p_value = min(1.0, 2 * min(p_value, math.erfc(abs(z) / math.sqrt(2))))  # two tests
    impossible = int((tokens.tied == 0).sum())
    passed = p_value > level and impossible <= total / 1000
    return Lossless("law", passed, f"{total} tokens, {impossible} impossible, p = {p_value:.2g}")
