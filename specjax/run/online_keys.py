"""The keys of mode online: how often a drafter is updated, with which loss and optimiser."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax import checks
from specjax.config import Config, given
from specjax.errors import UserError

# Keys of config.online that change no result.
FREE = ("checkpoint_every", "window")


@dataclasses.dataclass(frozen=True)
class OnlineOptions:
    """What only mode online reads."""

    update: Mapping[str, Any]  # the fields of ``train.online.Options``
    loss: Mapping[str, Any]  # keys of the drafter's loss
    optimiser: Mapping[str, Any]  # arguments of ``train.optimise.optimiser`` but the steps
    window: int  # requests of a window of the results
    checkpoint_every: int  # requests


def read(config: Config) -> OnlineOptions | None:
    """The options of mode online; None for other modes. Raises UserError."""
    if config.mode != "online":
        return None
    # Imported here because optax takes a second to import.
    from specjax.train import online, optimise

    keys = config.online.to_dict()
    for name in FREE:
        checks.whole(f"config.online.{name}", keys[name], 1)
    update = {name: value for name, value in keys.items() if name not in FREE}
    online.check(online.Options(**update), config.batch_size)
    optimise.optimiser(**config.optimiser, steps=1)
    if config.get("mesh"):
        raise UserError("config.mesh is not for mode online; leave it out")
    if grid := given(config.get("grid")):
        raise UserError(
            f"mode online decodes with one method, and config.grid.{next(iter(grid))} is given; "
            "leave it out"
        )
    return OnlineOptions(
        update,
        given(config.loss),
        config.optimiser.to_dict(),
        keys["window"],
        keys["checkpoint_every"],
    )
