"""Checks of real outputs that nothing was lost: token by token when greedy, by two tests of the law when sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.bench.token_probs import views
from specjax.theory import statistics
from specjax.types import LM, Drafter, ModelParams

LEAST = 400  # tokens: twenty in each of the twenty cells


class Lossless(NamedTuple):
    """The outcome of a check; ``passed`` None: too few tokens to say anything."""

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
    """Tests whether sampled outputs follow the target's law, at any vocabulary, from the outputs alone.

    Two views of every token given its prefix, both with known behaviour if nothing was lost:
    - The target's mass on more probable tokens, plus a uniform fraction of the token's own, is uniform and independent from
      token to token (Rosenblatt 1952): a chi-square over 20 cells sees favourites and outsiders.
    - Whether the token is one that the drafter likes better than the target does (``Drafter.probs``) is a coin whose chance
      the target's law tells: the sum of the differences is a martingale, tested as a normal z. Wrong residuals, matches
      that are drawn again, and claimed laws push tokens out of that set or into it.
    Also counted: tokens that the target never samples at all (more than one in a thousand fails).

    What it cannot see: noise reused between rounds, and biases below about 3 / sqrt(tokens). The tests of the rules are the
    proof; this is the smoke alarm on the real model.
    """
    better, own, liked, chance, _ = views(
        model, params, prompts, outputs, settings, drafter, width=width
    )
    total = len(better)
    if total < LEAST:
        return Lossless("law", None, f"{total} tokens are too few to tell, p = -")
    values = better + np.random.default_rng(seed).random(total) * own
    counts = np.bincount(np.clip((values * 20).astype(int), 0, 19), minlength=20)
    p_value = statistics.chi_square(counts, np.full(20, 0.05))[2]
    if (
        spread := (chance * (1 - chance)).sum()
    ) > 5:  # else there is no set that the drafter likes better
        z = (liked - chance).sum() / math.sqrt(spread)
        p_value = min(1.0, 2 * min(p_value, math.erfc(abs(z) / math.sqrt(2))))  # two tests
    never = int((own == 0).sum())
    passed = p_value > level and never <= total / 1000
    return Lossless("law", passed, f"{total} tokens, {never} impossible, p = {p_value:.2g}")
