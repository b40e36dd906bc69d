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
    1 - distinct 4-grams / all 4-grams of the outputs (``specjax.bench.text_checks``). Of the texts,
    not of the counts: loops raise tau.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.types import Records


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
        verified = None
        if self.verified is not None and other.verified is not None:
            verified = self.verified + other.verified
        return Counts(
            self.tokens + other.tokens,
            self.rounds + other.rounds,
            self.accepted + other.accepted,
            self.tested + other.tested,
            self.passed + other.passed,
            verified,
        )


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
    return Counts(
        int(emitted.sum()),
        int(ran.sum()),
        int(accepted.sum()),
        reached,
        passed,
        int(verified.sum()),
    )


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
