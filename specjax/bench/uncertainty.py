"""How far a measurement would differ on other prompts: standard errors and intervals over prompts.

The prompts are the sample: the rounds of one prompt depend on each other, so prompts and not rounds
are counted. Neither number covers what the machine does; the spread over the passes shows that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.bench import metrics
from specjax.bench.metrics import Counts
from specjax.bench.passes import Pass

LEVEL = 0.95
# The key "uncertainty" of results.json.
ABOUT = {
    "level": LEVEL,
    "method": "standard errors: ratio estimator over prompts; intervals of speed-ups: Student t of "
    "the log ratio, linearised, over prompts (at a batch size above 1 over batches), with the "
    "median rate of each over the passes",
}


FIRST = 32  # the first interval of positions ends here; each further one is twice as long

Rounds = Sequence[Sequence[int]]
"""The tokens that each round of a text emitted, for each text of one prompt."""


class Work(NamedTuple):
    """Tokens and seconds of one prompt, or of the prompts of one batch."""

    tokens: float
    seconds: float


def standard_errors(
    counts: Sequence[Counts], outputs: Sequence[Sequence[Sequence[int]]]
) -> dict[str, Any]:
    """The standard errors of tau, alpha (also by depth) and the share of repeated 4-grams.

    ``counts`` has one entry per prompt, and ``outputs`` the new tokens of each of its texts.
    """
    again, grams = zip(*(np.sum([*map(metrics.repeats, each)], 0) for each in outputs), strict=True)
    # By depth those passed and tested of every prompt.
    depths = np.array([[c.passed, c.tested] for c in counts], np.int64).transpose(2, 1, 0)
    by_depth = [ratio_error(*each) for each in depths if each[1].any()]
    return {
        "block_efficiency": ratio_error([c.tokens for c in counts], [c.rounds for c in counts]),
        "acceptance_rate": ratio_error(*depths.sum(0)),
        "acceptance_by_depth": by_depth or None,
        "repeated_4grams": ratio_error(again, grams),
    }


def ratio_error(parts: Sequence[float], wholes: Sequence[float]) -> float | None:
    """The standard error of sum(parts) / sum(wholes) over independent pairs.

    Linearised (Cochran, Sampling Techniques, 1977, section 6.4). None for fewer than two pairs with
    a whole above 0.
    """
    a, b = (np.asarray(x, np.float64) for x in (parts, wholes))
    a, b = a[b > 0], b[b > 0]
    if len(b) < 2:
        return None
    rest = a - a.sum() / b.sum() * b
    return float(math.sqrt(len(b) / (len(b) - 1) * (rest**2).sum()) / b.sum())


def around(value: float, error: float | None, count: int) -> list[float] | None:
    """[low, high] from a standard error over ``count`` prompts (Student t); None if it is None."""
    if error is None or count < 2:
        return None
    most = student_t(LEVEL, count - 1) * error
    return [value - most, value + most]


def along_text(rounds: Sequence[Rounds], prompt_tokens: Sequence[int]) -> dict[str, list[dict]]:
    """Tokens per round by the position in the text; one entry per prompt in both arguments.

    A round belongs to the position of its first token: in the output (0 for the first new token),
    and in the context (the tokens before it, prompt included). Positions are divided at 32, 64,
    128, ... Tokens and rounds of all intervals add up to those of the row: a text's last round,
    which end-of-sequence or the limit may cut, is in its interval.

    Returns:
        Two fields of a results row, lists of {"from", "to", "rounds", "tokens", "block_efficiency",
        "interval"}: positions from <= p < to, and the 95 % confidence interval of tau over prompts
        (Student t with ``ratio_error``; None for fewer than two prompts).
    """
    return {
        "tau_by_output_position": _by_position(rounds, [0] * len(rounds)),
        "tau_by_context_position": _by_position(rounds, prompt_tokens),
    }


def _by_position(rounds: Sequence[Rounds], begins: Sequence[int]) -> list[dict]:
    """The intervals that have rounds; ``begins`` are the positions of the first tokens."""
    of_prompt = []  # f64[intervals,2] rounds and tokens
    for texts, begin in zip(rounds, begins, strict=True):
        counts = np.zeros((64, 2))
        for text in texts:
            emitted = np.asarray(text, np.int64)
            starts = begin + np.cumsum(emitted) - emitted
            places = np.frexp(starts // FIRST)[1]
            np.add.at(counts, places, np.stack([np.ones(len(emitted)), emitted], -1))
        of_prompt.append(counts)
    sums = np.sum(of_prompt, axis=0)
    result = []
    for place in np.flatnonzero(sums[:, 0]).tolist():
        count, tokens = (int(each) for each in sums[place])
        begun, emitted = np.array(of_prompt)[:, place].T
        error = ratio_error(emitted, begun)
        result.append(
            {
                "from": FIRST << (place - 1) if place else 0,
                "to": FIRST << place,
                "rounds": count,
                "tokens": tokens,
                "block_efficiency": tokens / count,
                "interval": around(tokens / count, error, int(np.count_nonzero(begun))),
            }
        )
    return result


def speedup_interval(
    speedup: float, fast: Sequence[Work], plain: Sequence[Work]
) -> list[float] | None:
    """[low, high]: a confidence interval of a speed-up over prompts.

    The logarithm of the ratio of two rates is linearised in the four sums; its error has a Student
    t distribution. Both methods decode the same prompts, so what slows down both cancels.

    Args:
        speedup: the centre, on the scale of logarithms.
        fast, plain: of the method and of plain decoding, one entry per prompt (or batch).

    Returns:
        None for fewer than two entries that have tokens.
    """
    rows = np.array([(*a, *b) for a, b in zip(fast, plain, strict=True)], np.float64)
    rows = rows.reshape(-1, 4)
    rows = rows[(rows > 0).all(1)]
    if len(rows) < 2 or speedup <= 0:
        return None
    count = len(rows)
    effect = rows / rows.sum(0) @ np.array([1.0, -1.0, -1.0, 1.0])
    error = math.sqrt(count / (count - 1) * (effect**2).sum())
    factor = math.exp(student_t(LEVEL, count - 1) * error)
    return [speedup / factor, speedup * factor]


def works(passes: Sequence[Pass], groups: Sequence[Sequence[int]]) -> list[Work]:
    """Tokens and seconds of each group of prompts: of all passes the median rate.

    Args:
        passes: of one method.
        groups: numbers of prompts that were decoded together.
    """
    result = []
    for group in groups:
        tokens = [sum(len(p.outputs[i]) for i in group) for p in passes]
        # The seconds of every prompt are those of its batch.
        slowness = [p.seconds[group[0]] / n for p, n in zip(passes, tokens, strict=True) if n]
        mean = statistics.fmean(tokens)
        result.append(Work(mean, mean * statistics.median(slowness) if slowness else 0.0))
    return result


def student_t(level: float, freedom: int) -> float:
    """The number t with P(-t < T < t) = level, T having ``freedom`` degrees of freedom."""
    from scipy import special  # only here: it takes half a second to import

    return float(special.stdtrit(freedom, (1 + level) / 2))
