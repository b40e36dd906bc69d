"""The time of a round of a server that decodes a batch: drafting, and the target's pass.

A round drafts a number of tokens in each row and verifies them together. ``RoundWork`` says what it
computes; a cost model is a function of it. ``RooflineRounds`` computes the time from peak values of
a machine, ``MeasuredRounds`` interpolates times that were measured.

Not modelled: the draft model's own prompt, and the tokens that it has to read after rounds in which
it drafted nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specjax import checks
from specjax.errors import UserError
from specjax.theory import roofline


class RoundWork(NamedTuple):
    """What a round computes, over all rows of the batch."""

    rows: int
    verified: int  # tokens of the target's pass: drafted ones, and the pending one of each row
    widest: int  # most verified tokens of a row
    context: float  # cached tokens of all rows
    drafting: Sequence[int]  # rows that draft a first, second, ... token
    prompt: int = 0  # tokens of the prompts of new rows, which the pass also reads


RoundCosts = Callable[[RoundWork], float]
"""The seconds of a round."""


def work_of(drafted: np.ndarray, context: float, prompt: int = 0) -> RoundWork:
    """The work of a round in which row b drafts ``drafted[b]`` tokens (integers [B], B >= 1)."""
    # The rows that draft at least j tokens are those that draft j, j + 1, ... tokens.
    at_least = np.bincount(drafted)[::-1].cumsum()[::-1]
    return work_of_depths(len(drafted), at_least[1:].tolist(), context, prompt)


def work_of_depths(
    rows: int, drafting: Sequence[int], context: float, prompt: int = 0
) -> RoundWork:
    """The same from the number of rows that draft a first, second, ... token, all above 0."""
    return RoundWork(rows, rows + sum(drafting), 1 + len(drafting), context, drafting, prompt)


class RooflineRounds(NamedTuple):
    """The roofline model of a ragged batch: every pass takes the longer of reading and computing.

    With N tokens in a pass over rows with C cached tokens together, the pass takes
    max((W + C kappa) / bandwidth, N (F + G C / rows) / flops) + overhead seconds, symbols as in
    ``theory.roofline``. ``draft`` is the model that drafts token by token, None: drafts cost
    nothing. ``fixed`` are seconds of every round outside of its passes.
    """

    machine: roofline.Machine
    target: roofline.Model
    draft: roofline.Model | None = None
    fixed: float = 0.0

    def checked(self) -> RooflineRounds:
        """Itself. Raises UserError for numbers that no machine or model has."""
        for model in (self.target, self.draft):
            if model is not None:
                roofline.pass_time(self.machine, model, 1, 1)
        checks.cost("fixed", self.fixed)
        return self

    def __call__(self, work: RoundWork) -> float:
        """The seconds of a round."""
        each = work.context / work.rows
        tokens, rows = work.verified + work.prompt, work.rows
        time = self.fixed + self._pass(self.target, tokens, rows, work.context, each)
        if self.draft is not None:
            for rows in work.drafting:
                time += self._pass(self.draft, rows, rows, rows * each, each)
        return time

    def _pass(
        self, model: roofline.Model, tokens: int, rows: int, context: float, each: float
    ) -> float:
        machine = self.machine
        memory = model.weight_bytes + context * model.kv_bytes + rows * model.state_bytes
        memory /= machine.bandwidth
        memory += roofline.expert_time(machine, model, tokens)
        arithmetic = tokens * (model.flops + each * model.attention_flops) / machine.flops
        sending = tokens * model.sent_bytes / machine.link
        return max(memory, arithmetic) + sending + machine.overhead


class MeasuredRounds(NamedTuple):
    """Times of passes by their number of tokens, interpolated linearly; made by ``measured``.

    Beyond the largest measured number the last slope continues.
    """

    tokens: np.ndarray  # f64[n] tokens of a target's pass, increasing
    seconds: np.ndarray  # f64[n]
    rows: np.ndarray  # f64[m] rows of a draft, increasing
    draft: np.ndarray  # f64[m] seconds of a draft step, or of a whole draft
    context: float  # seconds of a target's pass per cached token of all rows
    fixed: float  # seconds of every round outside of its passes
    by_step: bool  # whether a draft takes ``draft`` seconds for each of its tokens
    padded: bool  # whether every row verifies as many tokens as the widest one

    def __call__(self, work: RoundWork) -> float:
        """The seconds of a round."""
        verified = work.rows * work.widest if self.padded else work.verified
        time = self.fixed + self.context * work.context
        time += _at(self.tokens, self.seconds, verified + work.prompt)
        for rows in work.drafting if self.by_step else work.drafting[:1]:
            time += _at(self.rows, self.draft, work.rows if self.padded else rows)
        return time


def measured(
    passes: Sequence[tuple[float, float]],
    drafts: Sequence[tuple[float, float]] = (),
    *,
    context: float = 0.0,
    fixed: float = 0.0,
    by_step: bool = True,
    padded: bool = False,
) -> MeasuredRounds:
    """A cost model from measured times.

    Args:
        passes: (tokens of all rows, seconds) of the target's pass, at least two.
        drafts: (rows, seconds) of drafting; none: drafts cost nothing.
        context: seconds of a pass per cached token of all rows.
        fixed: seconds of every round outside of its passes.
        by_step: whether ``drafts`` are times of one draft token (a draft model), not of a whole
            draft (a lookup).
        padded: whether rows are padded to the widest one, as in ``specjax.decode``.

    Raises UserError for times that are not positive, and sizes that are not increasing.
    """
    checks.yes_or_no("by_step", by_step)
    checks.yes_or_no("padded", padded)
    sizes, seconds = _curve("passes", passes, 2)
    rows, draft = _curve("drafts", drafts or [(0, 0.0), (1, 0.0)], 1, positive=bool(drafts))
    costs = checks.cost("context", context), checks.cost("fixed", fixed)
    return MeasuredRounds(sizes, seconds, rows, draft, *costs, by_step, padded)


def _curve(
    name: str, points: npt.ArrayLike, least: int, positive: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    table = checks.numbers(name, points)
    if table.ndim != 2 or table.shape[1] != 2 or len(table) < least:
        raise UserError(f"{name} has shape {table.shape}; give at least {least} rows (size, time)")
    sizes, times = table.T
    if (np.diff(sizes) <= 0).any() or (positive and (times <= 0).any()):
        raise UserError(f"{name} must have increasing sizes and positive times")
    return sizes.copy(), times.copy()


def _at(sizes: np.ndarray, seconds: np.ndarray, size: float) -> float:
    last = len(sizes) - 1
    if size <= sizes[last] or not last:
        return float(np.interp(size, sizes, seconds))
    slope = (seconds[last] - seconds[last - 1]) / (sizes[last] - sizes[last - 1])
    return float(seconds[last] + max(slope, 0.0) * (size - sizes[last]))
