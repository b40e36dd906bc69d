"""The settings of a training run: the numbers of steps, and how a step is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax import checks

PRECISIONS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Numbers of steps; each is the key of ``config.train`` of that name.

    The last step is logged, evaluated and saved in any case. Raises UserError unless all are whole
    numbers >= 1.
    """

    steps: int
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            checks.whole(f"config.train.{name}", value, 1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run is computed, and which parameters it returns. Raises UserError for invalid values.

    Every field except ``seed`` and ``devices`` is the key of ``config.train`` of that name.
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
    devices: tuple[Any, ...] | None = None  # of jax.Device; None = all local ones

    def __post_init__(self):
        checks.whole("config.train.accumulate", self.accumulate, 1)
        checks.number("config.train.ema", self.ema, "in [0, 1), 0 = off", lambda x: 0 <= x < 1)
        checks.one_of("config.train.precision", self.precision, PRECISIONS)
        checks.one_of("config.train.keep", self.keep, ("last", "best"))

    @property
    def higher_is_better(self) -> bool:
        """Whether the largest value of ``best`` is the best one."""
        return any(name in self.best for name in ("tau", "alpha", "agreement", "accuracy"))
