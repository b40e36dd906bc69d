"""``config.spire`` of objective distill: the draft is a SPIRe model (2504.06419)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tokenizers import Tokenizer

from specjax.config import Config
from specjax.errors import UserError
from specjax.models.spire import directory
from specjax.models.spire.config import SpireConfig, check
from specjax.models.spire.model import from_config
from specjax.models.transformer_config import TransformerConfig
from specjax.train.recipes import common
from specjax.types import LM


def shape_of(config: Config, decoder: TransformerConfig) -> SpireConfig:
    """The SPIRe model with these layers. Raises UserError for a wrong value of ``config.spire``."""
    keys, known = config.spire.to_dict(), ("sinks", "window", "feedback", "own")
    if wrong := [key for key in (*keys, *known) if (key in keys) != (key in known)]:
        raise UserError(f"config.spire has the keys {', '.join(known)}; {wrong[0]!r} is wrong")
    shape = SpireConfig(decoder, **keys)
    check(shape, "config.spire.")
    return shape


def load(config: Config, vocabulary: str) -> tuple[SpireConfig, dict]:
    """The SPIRe model ``config.init``.

    Raises UserError if it has another tokenizer, or other values than ``config.spire``.
    """
    where = common.placement(config)
    loaded = directory.load(config.init, dtype=jnp.float32, on_host=where.spread)
    if loaded.lm.vocabulary not in (None, vocabulary):
        raise UserError(
            f"config.init {loaded.directory} has another tokenizer; give a model with the same one"
        )
    shape = shape_of(config, loaded.config.decoder)
    if shape != loaded.config:
        key = next(
            key for key in config.spire if getattr(shape, key) != getattr(loaded.config, key)
        )
        raise UserError(
            f"config.spire.{key} is {getattr(shape, key)}, and the model config.init was trained "
            f"with {getattr(loaded.config, key)}; give this value"
        )
    return shape, loaded.params


def language_model(config: Config, shape: SpireConfig) -> LM:
    """The model in ``config.train.precision``, with ``config.train.remat``."""
    precision = jnp.dtype(config.train.precision)
    return from_config(shape, precision, remat=config.train.get("remat", False))


def saver(
    workdir: Path, shape: SpireConfig, tokenizer: Tokenizer, layers: str
) -> Callable[[Any, dict], None]:
    """A function (params, summary) that writes summary.json and the model directory."""

    def save(params, summary):
        common.write_json(workdir / "summary.json", summary)
        directory.save(workdir / "model", shape, params, tokenizer, layers)

    return save
