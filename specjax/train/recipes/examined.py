"""What is measured of a draft model or heads on held-out prompts: tokens per round, accuracies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from specjax import drafters
from specjax.config import Config
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import examine, update
from specjax.train.recipes.material import Material
from specjax.types import LM, Drafter, ModelParams

_RANKS = 10  # choices of a head whose accuracy is measured


def draft_model(config: Config, target: hf.Loaded, model: LM, material: Material):
    """``examiner`` for a draft model that drafts ``config.examine.gamma`` tokens per round."""
    model = model._replace(vocabulary=target.lm.vocabulary)
    _check_positions(config, material, model.max_positions, "draft")
    keys = {"model": model, "gamma": config.examine.gamma, "params": {}}
    drafter = drafters.make(drafters.WITH_MODEL, target.lm, **keys)
    return examiner(config, drafter, target, material)


def examiner(
    config: Config, drafter: Drafter, target: hf.Loaded, material: Material, moving: bool = False
) -> Callable[[Any], dict[str, float]] | None:
    """``Task.examine``: tokens per round on the held-out prompts; None if there are no prompts.

    ``moving``: the target is trained too.
    """
    if not material.prompts:
        return None
    _check_positions(config, material, target.config.longest_text, "target")
    sizes, precision = config.examine, config.train.precision
    measure = examine.examiner(
        *(target.lm, drafter, update.cast(target.params, precision), material.prompts),
        new_tokens=sizes.new_tokens,
        temperatures=tuple(sizes.temperatures),
        eos_id=target.config.eos_token_id,
        seed=config.seed,
        moving=moving,
    )
    return lambda params: measure(update.cast(params, precision))


def accuracy(
    config: Config, target: hf.Loaded, drafter: Drafter, params: ModelParams, material: Material
) -> dict[str, list[list[float]]]:
    """ "accuracy": [heads][ranks], how often a head's choice of each rank is the target's token.

    Measured on the target's own continuations of the held-out prompts. {} without prompts, and for
    drafters that have no ranks.
    """
    if not material.prompts or drafter.training is None or drafter.training.ranks is None:
        return {}
    settings = config.examine
    params = update.cast(params, config.train.precision)
    write = functools.partial(
        examine.write, target.lm, params, material.prompts, settings.new_tokens
    )
    written = [
        write(float(temperature), target.config.eos_token_id, config.seed)
        for temperature in settings.temperatures
    ]
    lengths = [len(prompt) for prompt in material.prompts]
    return {"accuracy": examine.accuracy(drafter, params, written, lengths, _RANKS)}


def _check_positions(config: Config, material: Material, positions: int | None, what: str) -> None:
    if not material.prompts or positions is None:
        return
    longest = max(map(len, material.prompts)) + config.examine.new_tokens
    if longest > positions:
        raise UserError(
            f"config.examine needs {longest} positions and the {what} has {positions}; "
            "lower new_tokens"
        )
