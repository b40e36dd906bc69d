"""The keys of how texts are decoded: sampling, stop strings, verified widths, devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax import sampling, sharding
from specjax.config import Config
from specjax.errors import UserError
from specjax.generation import stops as stops_lib
from specjax.models import hf

_MOST = 1 << 22  # no vocabulary has so many tokens


def check(settings: Mapping[str, Any]) -> None:
    """Checks ``config.sampling``, before any model is read. Raises UserError."""
    biased = bias(settings.get("logit_bias") or "")
    banned = settings.get("banned") or ()
    if any(isinstance(each, bool) or not isinstance(each, int) for each in banned):
        raise UserError(f"config.sampling.banned is {banned!r}; it must hold token ids")
    for key, ids in (("banned", banned), ("logit_bias", biased)):
        if max([*ids, 0]) >= _MOST:
            value = settings[key]
            raise UserError(f"config.sampling.{key} is {value!r}; no vocabulary has such an id")
    # A vocabulary in which a token stays and another one ends a text.
    size = max([*banned, *biased, 0]) + 3
    more = {"end_ids": size - 1, "vocab_size": size, "logit_bias": biased}
    sampling.make_sampling(1, **{**settings, **more})


def complete(settings: Mapping[str, Any], target: hf.Loaded) -> dict[str, Any]:
    """The arguments of ``make_sampling`` for this target. Raises UserError."""
    result = {**settings, "logit_bias": bias(settings.get("logit_bias") or "")}
    if result.get("min_new_tokens"):
        if not target.config.eos_token_id:
            raise UserError(
                "config.sampling.min_new_tokens is given, and the model names no end-of-sequence "
                "token that could wait; leave it out"
            )
        result["end_ids"] = target.config.eos_token_id
    if result.get("banned") or result["logit_bias"]:
        result["vocab_size"] = target.lm.vocab_size
    sampling.make_sampling(1, **result)
    return result


def bias(value: Any) -> dict[int, float]:
    """``config.sampling.logit_bias``: "12:-1.5,30:2", a number for each id. Raises UserError."""
    result: dict[int, float] = {}
    try:
        for each in str(value).split(",") if value else ():
            token, number = each.split(":")
            if int(token) < 0 or int(token) in result:
                raise ValueError
            result[int(token)] = float(number)
    except ValueError:
        raise UserError(
            f"config.sampling.logit_bias is {value!r}; it must have the form '12:-1.5,30:2': a "
            "token id and what is added to its logit, each id once"
        ) from None
    return result


def stops(config: Config) -> tuple[str, ...]:
    """``config.stop``. Raises UserError for an empty text, and where it would have no effect."""
    value = config.get("stop") or ()
    result = stops_lib.check(value)
    if result and config.mode not in ("generate", "chat"):
        raise UserError(
            f"config.stop is for modes generate and chat, not for mode {config.mode}; leave it out"
        )
    return result


def widths(value: Any) -> tuple[int, ...] | None:
    """``config.verify_widths``: "auto", "full", or numbers separated by commas."""
    if value == "auto":
        return None
    if value == "full":
        return ()
    try:
        result = tuple(int(each) for each in str(value).split(","))
    except ValueError:
        result = (0,)
    if min(result) < 1:
        raise UserError(
            f"config.verify_widths is {value!r}; it must be 'auto', 'full', or whole numbers >= 1 "
            "separated by commas, such as '1,5,11'"
        )
    return result


def mesh(config: Config) -> str:
    """``config.mesh``. Raises UserError for another form, and where it would be ignored."""
    value = config.get("mesh") or ""
    if value:
        sharding.parse(value)
        if config.mode == "replay":
            raise UserError("config.mesh is not for mode replay; leave it out")
    return value
