"""``config.pard`` of objective distill: the draft learns to draft in one pass (2504.18583)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax import checks, drafters
from specjax.config import Config
from specjax.drafters.draft_models import pard
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.transformer_config import TransformerConfig
from specjax.train import objectives
from specjax.train.recipes import common
from specjax.types import LM, Drafter


def drafter_of(config: Config, target: hf.Loaded, model: LM) -> Drafter:
    """The drafter that is trained. Raises UserError for a wrong value of ``config.pard``."""
    keys, known = config.pard.to_dict(), ("tokens", "mask_id")
    if wrong := [key for key in keys if key not in known]:
        raise UserError(f"config.pard has the keys {', '.join(known)}; {wrong[0]!r} is wrong")
    for other in ("boosted", "spire"):
        if config.get(other):
            raise UserError(f"config.pard and config.{other} are both given; give one of them")
    tokens = checks.whole("config.pard.tokens", keys["tokens"], 1)
    if tokens >= config.train.length:
        raise UserError(
            f"a draft of {tokens} tokens looks beyond config.train.length {config.train.length}; "
            "raise it"
        )
    return drafters.make(
        pard.NAME,
        target.lm,
        model=model._replace(vocabulary=target.lm.vocabulary),
        gamma=tokens,
        mask_id=mask_of(config, target),
        params={},
    )


def mask_of(config: Config, target: hf.Loaded) -> int:
    """The id of the mask; without a key the last token of the vocabulary."""
    own = config.pard.get("mask_id")
    return target.lm.vocab_size - 1 if own is None else checks.whole("config.pard.mask_id", own, 0)


def loss(config: Config, drafter: Drafter) -> objectives.Loss:
    """The loss with the keys of ``config.loss``. Raises UserError for one that it does not take."""
    assert drafter.training is not None and drafter.training.loss is not None
    known = inspect.signature(drafter.training.loss).parameters.values()
    names = [each.name for each in known if each.kind is each.KEYWORD_ONLY]
    common.check_loss_keys(config.loss, names, pard.NAME)
    return functools.partial(drafter.training.loss, **config.loss.to_dict())


def saver(
    config: Config, workdir: Path, shape: TransformerConfig, target: hf.Loaded
) -> Callable[[Any, dict], None]:
    """A function (params, summary) that writes summary.json and the model directory."""
    assert target.tokenizer is not None
    more = {pard.MASK: mask_of(config, target), pard.TOKENS: config.pard.tokens}
    return common.model_saver(workdir, shape, target.tokenizer, more)
