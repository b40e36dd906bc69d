"""What defines a method, and how the objects that run it are built from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from specjax import accept, drafters
from specjax.bench.passes import Method
from specjax.errors import UserError
from specjax.types import LM, Accept, Drafter, ModelParams


class Objects(NamedTuple):
    """A drafter and its rule."""

    drafter: Drafter
    rule: Accept


class MethodChoice(NamedTuple):
    """The keys of one method, as a configuration gives them."""

    drafter: dict  # its keys, "name" among them
    rule: str  # "": the recommended rule for the drafter
    rule_keys: dict
    warm: bool = False  # whether it learns from other prompts before it is measured


def objects(target: LM, choice: MethodChoice, temperatures: Sequence[float]) -> Objects:
    """The drafter and its rule, without parameters. Raises UserError: see ``build``."""
    drafter = drafters.make(target=target, **choice.drafter)
    rule = accept.load(choice.rule or accept.default_rule(drafter), **choice.rule_keys)
    accept.check_pair(drafter, rule)
    if drafter.greedy_only and any(temperatures):
        raise UserError(
            f"drafter {drafter.name} is for temperature 0 only; set config.sampling.temperature=0"
        )
    if choice.warm and drafter.learn is None:
        raise UserError(f"drafter {drafter.name} does not learn from other prompts; leave warm out")
    if not choice.warm and "memory" in choice.drafter:
        raise UserError(
            f"memory is {choice.drafter['memory']}: it limits what a warm drafter learns, and this "
            "one is not warm; set warm=True in a bench, or leave memory out"
        )
    return Objects(drafter, rule)


def build(
    target: LM,
    target_params: Any,
    choice: MethodChoice,
    *,
    label: str,
    seed: int,
    temperatures: Sequence[float],
) -> Method:
    """The drafter with its rule and its parameters.

    Args:
        target, target_params: the model that the drafter is made for.
        choice: the keys of the method.
        label: the name of the method; "" = the name of its drafter.
        seed: for parameters that are drawn at random.
        temperatures: every temperature at which the method will run.

    Raises:
        UserError: unknown names and keys, a rule or a temperature that does not fit the drafter, a
            warm run of a drafter that does not learn, ``memory`` for a run that is not warm.
    """
    drafter, rule = objects(target, choice, temperatures)
    params = ModelParams(target_params, drafter.init_params(jax.random.key(seed)))
    return Method(label or drafter.name, drafter, rule, params, choice.warm)
