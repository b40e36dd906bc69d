"""Two warnings about the texts of a measurement: outputs that loop, and prompts without meaning.

Both raise block efficiency (tau) or make it meaningless without any error in the measurement. A
weak model at temperature 0 repeats sentences, which every lookup predicts. After random tokens,
which some tools take as prompts because only their number matters there, a model does not write
what it writes for users.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

GRAM = 4
# Fewer prompt tokens than this do not show how they are distributed.
LEAST = 128
# Random ids may leave out special tokens or a part of the vocabulary. Natural text is at 0.36 and
# above: 480 questions of Spec-Bench with vocabularies of 512 to 50,277 tokens.
NEAR = 0.05
# The distance that random ids exceed once in 1000 times, times the root of their number.
KOLMOGOROV = 1.95


def repeats(output: Sequence[int]) -> tuple[int, int]:
    """How many 4-grams of one output occurred in it before, and how many there are."""
    grams = list(zip(*(output[start:] for start in range(GRAM)), strict=False))
    return len(grams) - len(set(grams)), len(grams)


def repeated_4grams(outputs: Sequence[Sequence[int]]) -> float | None:
    """1 - distinct 4-grams / all 4-grams, each output by itself, over all outputs.

    0: no four tokens occur twice in an output; near 1: the outputs are loops. None if no output
    has four tokens.
    """
    pairs = [repeats(output) for output in outputs]
    count = sum(every for _, every in pairs)
    return sum(again for again, _ in pairs) / count if count else None


def random_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> bool | None:
    """Whether the prompts look like token ids that were drawn uniformly from the vocabulary.

    The largest distance between the distribution of all ids and the uniform one (Kolmogorov and
    Smirnov) is near 0. None for too few tokens.
    """
    ids = np.sort(np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts]))
    if len(ids) < LEAST:
        return None
    uniform, step = (ids + 0.5) / vocab_size, 1 / len(ids)
    below = np.arange(len(ids)) * step
    distance = np.maximum(np.abs(below + step - uniform), np.abs(below - uniform)).max()
    return bool(distance < NEAR + KOLMOGOROV / math.sqrt(len(ids)))
