"""The settings of a training run: the numbers of steps, and how a step is computed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from specjax import checks, sharding

PRECISIONS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Numbers of steps; each is the key of ``config.train`` of that name.

    The last step is logged, evaluated and saved in any case. Raises UserError unless all are whole
    numbers >= 1 (``eval_every``: >= 0).
    """

    steps: int
    log_every: int = 10
    # 0: 100, or a twentieth of the steps if that is more.
    eval_every: int = 0
    checkpoint_every: int = 100
    # ``config.examine.every``: least distance between two measurements of tokens per round.
    examine_every: int = 100

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            key = "examine.every" if name == "examine_every" else f"train.{name}"
            checks.whole(f"config.{key}", value, 0 if name == "eval_every" else 1)

    @property
    def eval_interval(self) -> int:
        """Steps from one evaluation to the next."""
        return self.eval_every or max(100, math.ceil(self.steps / 20))

    def evaluates(self, step: int) -> bool:
        """Whether there is an evaluation after ``step`` (counted from 1)."""
        return step == self.steps or step % self.eval_interval == 0

    def examines(self, step: int) -> bool:
        """Whether the evaluation after ``step`` also measures tokens per round.

        It does at the last step, and where a multiple of ``examine_every`` was reached since the
        evaluation before. This depends on the step alone, so a resumed run does the same.
        """
        every = self.examine_every
        return step == self.steps or step // every > (step - self.eval_interval) // every


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run is computed, and which parameters it returns. Raises UserError for invalid values.

    Every field except ``seed``, ``mesh`` and ``devices`` is the key of ``config.train`` of that
    name.
    """

    seed: int = 0
    # The gradient is computed in this many parts of the batch, one after the other; each part is
    # divided among the devices.
    accumulate: int = 1
    # Decay of averaged parameters, which are then evaluated, examined and returned; 0 = no average.
    ema: float = 0.0
    # With "bfloat16" the loss and ``Task.rewrite`` get parameters cast to it. Parameters, gradients
    # and the state of the optimiser are float32.
    precision: str = "float32"
    keep: str = "last"  # which parameters are returned: "last" or "best"
    # The logged value that decides which step is best: the lowest, or the highest of tau, alpha,
    # agreement and accuracy.
    best: str = "heldout_loss"
    resume_changed: bool = False  # resume a run although its configuration was different
    # Axes of ``sharding.make_mesh``, such as "data:2,fsdp:4"; "" = "data" with all devices.
    mesh: str = ""
    devices: tuple[Any, ...] | None = None  # of jax.Device; None = all

    def __post_init__(self):
        checks.whole("config.train.accumulate", self.accumulate, 1)
        checks.number("config.train.ema", self.ema, "in [0, 1), 0 = off", lambda x: 0 <= x < 1)
        checks.one_of("config.train.precision", self.precision, PRECISIONS)
        checks.one_of("config.train.keep", self.keep, ("last", "best"))
        if self.mesh:
            sharding.parse(self.mesh)

    @property
    def examine_always(self) -> bool:
        """Whether every evaluation measures tokens per round.

        What decides, and what is reported of the best step, must be measured every time.
        """
        return self.keep == "best" or self.best != "heldout_loss"

    @property
    def higher_is_better(self) -> bool:
        """Whether the largest value of ``best`` is the best one."""
        return any(name in self.best for name in ("tau", "alpha", "agreement", "accuracy"))
