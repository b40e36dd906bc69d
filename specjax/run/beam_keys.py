"""The keys of beam search in mode generate, and what they exclude."""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from specjax import checks
from specjax.config import Config, given
from specjax.errors import UserError

DEFAULTS: dict[str, Any] = {
    "count": 0,
    "returned": 1,
    "length_penalty": 1.0,
    "early_stopping": "false",
    "draft": 0,
}
EARLY = {"false": False, "true": True, "never": "never"}
# The keys of ``config.sampling`` when they change nothing.
_NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0, "banned": (), "logit_bias": ""}


@dataclasses.dataclass(frozen=True)
class BeamOptions:
    """The arguments of ``beam_search``."""

    beams: int
    returned: int
    length_penalty: float
    early_stopping: bool | str
    draft: int | None  # the beams of the draft model; None: as many


def read(config: Config) -> BeamOptions | None:
    """The options of beam search; None without it. Raises UserError for keys that do not apply."""
    given_keys = config.get("beams")
    if given_keys is None:
        return None
    for key in given_keys:
        if key not in DEFAULTS:
            raise UserError(f"config.beams.{key} is unknown; the keys are {', '.join(DEFAULTS)}")
    keys: Any = ConfigDict(DEFAULTS | dict(given_keys.items()))
    if not keys.count:
        for key, value in keys.items():
            if value != DEFAULTS[key]:
                raise UserError(
                    f"config.beams.{key} is {value!r} and config.beams.count is 0, which is no "
                    "beam search; set config.beams.count to the number of beams"
                )
        return None
    if checks.whole("config.beams.count", keys.count, 1) == 1:
        raise UserError(
            "config.beams.count is 1, which is greedy decoding; leave it out, or take at least 2"
        )
    if checks.whole("config.beams.returned", keys.returned, 1) > keys.count:
        raise UserError(
            f"config.beams.returned is {keys.returned} and config.beams.count {keys.count}; "
            "return at most all beams"
        )
    checks.number(
        "config.beams.length_penalty", keys.length_penalty, "that is finite", lambda x: True
    )
    checks.one_of("config.beams.early_stopping", keys.early_stopping, tuple(EARLY))
    if checks.whole("config.beams.draft", keys.draft, 0) and keys.draft < keys.count:
        raise UserError(
            f"config.beams.draft is {keys.draft} and config.beams.count {keys.count}; a draft has "
            "at least as many beams as the target"
        )
    _check_decoding(config)
    _check_drafter(config, keys.draft)
    return BeamOptions(
        keys.count,
        keys.returned,
        float(keys.length_penalty),
        EARLY[keys.early_stopping],
        keys.draft or None,
    )


def _check_decoding(config: Config) -> None:
    """Raises UserError for keys of decoding that beam search would ignore."""
    if config.mode != "generate":
        raise UserError(
            f"config.beams is for mode generate, not for mode {config.mode}; leave it out"
        )
    if config.accept or given(config.get("accept_keys")):
        raise UserError(
            f"config.accept is {config.accept!r} and beam search has no acceptance rule: a step is "
            "accepted if all beams of the target are among the draft's; leave it out"
        )
    if given(config.get("grid")):
        raise UserError(
            "config.grid is given, and beam search decodes with config.drafter alone; leave it out"
        )
    for key, value in config.sampling.items():
        if value != _NEUTRAL.get(key, 0):
            raise UserError(
                f"config.sampling.{key} is {value!r}, and beam search takes the model's own "
                f"probabilities; set it to {_NEUTRAL.get(key, 0)!r}, or leave config.beams out"
            )
    for key, neutral in (("stop", ()), ("mesh", ""), ("verify_widths", "auto")):
        if (value := config.get(key) or neutral) != neutral:
            raise UserError(
                f"config.{key} is {value!r}, which beam search does not support; leave it out"
            )


def _check_drafter(config: Config, drafted: int) -> None:
    """Raises UserError for a drafter whose drafts are not beams."""
    keys = given(config.drafter)
    name = keys.pop("name")
    if name not in ("none", "draft_model"):
        raise UserError(
            f"config.drafter.name is {name!r}, and its drafts are no beams; take draft_model for "
            "speculative beams, or none for plain ones"
        )
    own = ("model", "gamma") if name == "draft_model" else ()
    if unused := [key for key, value in keys.items() if key not in own and value]:
        raise UserError(
            f"config.drafter.{unused[0]} has no effect on beam search; leave it out"
            + (" (config.beams.draft is the number of the draft's beams)" if own else "")
        )
    if name == "none" and drafted:
        raise UserError(
            f"config.beams.draft is {drafted} and there is no draft model; name one: "
            "config.drafter.name=draft_model and config.drafter.model"
        )
