"""Checks of the keys of ``_rollout_loss.loss``."""

from __future__ import annotations

from typing import Any

from specjax.checks import number, one_of, whole, yes_or_no
from specjax.divergences import DIVERGENCES
from specjax.drafters.heads._network import Network
from specjax.errors import UserError
from specjax.types import LM, Batch


def check(network: Network, target: LM, batch: Batch, values: dict[str, Any]) -> None:
    """Checks the keys of ``_rollout_loss.loss`` and the length of the text. Raises UserError."""
    for name in ("steps", "top_k"):
        whole(f"loss.{name}", values[name], 1)
    for name in ("decay", "feature", "weight", "ce", "top_k_weight", "noise"):
        number(f"loss.{name}", values[name], ">= 0", lambda x: x >= 0)
    for name in ("detach", "in_vocabulary"):
        yes_or_no(f"loss.{name}", values[name])
    one_of("loss.divergence", values["divergence"], tuple(DIVERGENCES))
    _check_effects(network, target, values)
    size, steps = batch.tokens.shape[1], values["steps"]
    if size < steps + 2:
        raise UserError(
            f"step {steps} of a draft predicts {steps + 1} tokens ahead; raise train.length to "
            f"{steps + 1} or more, or lower loss.steps"
        )


def _check_effects(network: Network, target: LM, values: dict[str, Any]) -> None:
    if not any(values[name] for name in ("feature", "weight", "ce", "top_k_weight")):
        raise UserError(
            "loss.feature, loss.weight, loss.ce and loss.top_k_weight are all 0; make one of them "
            "positive"
        )
    for name, usual, other in (
        ("divergence", "forward_kl", "weight"),
        ("top_k", 10, "top_k_weight"),
    ):
        if values[name] != usual and not values[other]:
            raise UserError(
                f"loss.{name} is {values[name]!r} and loss.{other}, its weight, is 0; give "
                f"loss.{other}, or leave loss.{name} out"
            )
    if values["detach"] and values["steps"] == 1:
        raise UserError(
            "loss.detach is True and has no effect on one step; raise loss.steps, or set "
            "loss.detach to False"
        )
    if not values["in_vocabulary"] and network.ids is None:
        raise UserError(
            "loss.in_vocabulary is False, and all tokens can be drafted; give "
            "drafter.draft_vocab, or leave loss.in_vocabulary out"
        )
    if values["feature"] and (network.taps or network.width != target.width):
        raise UserError(
            f"loss.feature is {values['feature']}, and {network.name} does not predict the "
            "target's features; leave it 0"
        )
    if values["steps"] < network.modules:
        raise UserError(
            f"loss.steps is {values['steps']}, and {network.name} has {network.modules} modules; "
            "give one step for each, or more"
        )
    width = target.vocab_size if network.ids is None else len(network.ids)
    if values["top_k_weight"] and values["top_k"] > width:
        raise UserError(
            f"loss.top_k is {values['top_k']} and the draft vocabulary has {width} tokens; it must "
            f"be at most {width}"
        )
