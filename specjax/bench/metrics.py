"""The metrics that are computed from the counts of a decode loop.

Where a bench has several timed passes, the counts of sampled rows are the sums over all passes:
each has its own seed. Greedy passes are equal, so those rows have the counts of one pass.

tokens, rounds
    Tokens emitted, and rounds of all rows.
block_efficiency (tau)
    Tokens emitted per round of a row, the target's own token included, after cutting at
    end-of-sequence and limits: between 1 and gamma + 1.
accepted_per_round
    Draft tokens accepted per round, before cutting; tau - 1 if nothing is cut.
verified_per_round
    Tokens that the target was fed per round: the pending token and the verified nodes. A round may
    verify fewer nodes than the draft has room for. None in a replay.
acceptance_rate (alpha)
    Accepted / tested depths. A depth is tested if all depths before it were accepted and the draft
    has a node there. So it is the probability that a draft token (on a tree: one of the siblings)
    is accepted, given that its prefix was.
acceptance_by_depth
    The same by depth; entry i is conditional on i accepted tokens before it.
repeated_4grams
    1 - distinct 4-grams / all 4-grams of the outputs (``repeated_4grams``). Of the texts,
    not of the counts: loops raise tau, without any error in the measurement. A weak model at
    temperature 0 repeats sentences, which every lookup predicts.
random_prompts
    Whether the prompts look like random tokens (``random_prompts``). After such prompts, which some
    tools take because only their number matters there, a model does not write what it writes for
    users.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.types import Records

# A drafter with a lower speed-up is not worth its memory.
WORTH = 1.02


class Counts(NamedTuple):
    """Sums over rounds and rows."""

    tokens: int
    rounds: int
    accepted: int
    tested: np.ndarray  # i64[depth] how often a draft token was tested at each depth
    passed: np.ndarray  # i64[depth] how often one was accepted there
    verified: int | None = None  # tokens that the target was fed

    def plus(self, other: Counts) -> Counts:
        """The sums over both."""
        pairs = zip(self, other, strict=True)
        sums: Any = (None if a is None or b is None else a + b for a, b in pairs)
        return Counts(*sums)


def total(counts: Sequence[Counts]) -> Counts:
    """The sums over all; needs at least one."""
    return functools.reduce(Counts.plus, counts)


def count(records: Records, rows: Sequence[bool], depth: int) -> Counts:
    """Counts of the rows marked True (the others fill up a batch).

    ``depth`` is the drafter's longest path.
    """
    chosen = np.asarray(rows, bool)
    emitted, accepted, drafted, tested, verified = (np.asarray(x)[:, chosen] for x in records)
    # A finished row drafts and emits nothing; any other row runs a round.
    ran = (emitted > 0) | (drafted > 0)
    level = np.arange(depth)
    passed = ((accepted[..., None] > level) & ran[..., None]).sum((0, 1))
    reached = ((tested[..., None] > level) & ran[..., None]).sum((0, 1))
    tokens, rounds, kept, fed = (int(each.sum()) for each in (emitted, ran, accepted, verified))
    return Counts(tokens, rounds, kept, reached, passed, fed)


def summary(counts: Counts) -> dict:
    """The fields of a results row that follow from counts; None if no token was drafted."""
    tested, passed = int(counts.tested.sum()), int(counts.passed.sum())
    fed = counts.verified
    by_depth = [int(p) / int(t) for p, t in zip(counts.passed, counts.tested, strict=True) if t]
    return {
        "tokens": counts.tokens,
        "rounds": counts.rounds,
        "block_efficiency": counts.tokens / counts.rounds if counts.rounds else None,
        "accepted_per_round": counts.accepted / counts.rounds if counts.rounds else None,
        "verified_per_round": fed / counts.rounds if fed is not None and counts.rounds else None,
        "acceptance_rate": passed / tested if tested else None,
        "acceptance_by_depth": by_depth or None,
    }


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
