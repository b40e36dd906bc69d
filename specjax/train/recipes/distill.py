"""Objective distill: a draft model that imitates the target (DistillSpec, 2310.08461).

With ``config.pard`` the draft learns to draft in one pass (2504.18583); with ``config.spire`` it is
a SPIRe model (2504.06419).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax import config as config_lib
from specjax import drafters
from specjax.config import Config
from specjax.drafters.draft_models import pard, spire_model
from specjax.drafters.draft_models._small_model import check_vocabulary, in_size
from specjax.drafters.draft_models.spire_model import SpireConfig, check, from_config, with_memory
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.transformer_config import TransformerConfig
from specjax.train import initial, objectives, writer
from specjax.train.loop import Task
from specjax.train.recipes import checks, common, examined, shapes
from specjax.train.recipes import material as materials
from specjax.train.recipes.common import Prepared
from specjax.train.settings import PardKeys, SpireKeys
from specjax.types import LM, Drafter


class _Draft(NamedTuple):
    """The model that is trained."""

    decoder: TransformerConfig
    model: LM
    params: Any  # to start from
    save: Callable[[Any, dict], None]


def prepare(config: Config, workdir: Path) -> Prepared:
    """Makes the run. Raises UserError."""
    target = common.load_target(config)
    for key in ("spire", "pard"):
        if config[key] and target.lm.encoder is not None:
            raise UserError(
                f"{target.directory} is an encoder-decoder model, and config.{key} trains "
                "decoders; leave it out"
            )
    make = _spire if config.spire else _plain
    decoder, model, params, save = make(config, workdir, target)
    if decoder.max_positions < config.train.length:
        raise UserError(
            f"config.train.length {config.train.length} is beyond the draft's "
            f"{decoder.max_positions} positions"
        )
    # The model may be made of the target's layers; config.model then is not read.
    if config.data.on_policy and model.encoder is None:
        checks.check_on_policy_prompt(config)
    parallel = None
    if config.pard:
        parallel = _pard(config, target, model)
        assert parallel.training is not None and parallel.training.loss is not None
        loss = parallel.training.loss
        loss = functools.partial(loss, **common.loss_keys(loss, config.loss, pard.NAME))
        more = {pard.MASK: _mask_of(config, target), pard.TOKENS: config.pard.tokens}
        save = common.saver(workdir, hf.save, decoder, tokenizer=target.text_tokenizer, more=more)
    else:
        loss = common.make_loss(objectives.distill_loss, config.loss, "distill", target.lm, model)
    theirs = target.params
    if config.boosted:
        earlier = _earlier(config, target)
        loss = objectives.boosted(loss, [each.lm for each in earlier])
        theirs = {"target": theirs, "earlier": [each.params for each in earlier]}
    own = target.text_tokenizer, target.directory, shapes.ends_of(target)
    material = materials.gather(config, workdir, *own)
    rewrite = None
    if config.data.on_policy:
        rewrite = writer.rewriter(
            model,
            config.data.on_policy,
            config.data.on_policy_prompt,
            config.loss.get("temperature", 1.0),
            target.config.eos_token_id,
        )
    if parallel is None:
        examine = examined.draft_model(config, target, model, material)
    else:
        examine = examined.examiner(config, parallel, target, material)
    task = Task(loss, params, theirs, material.batches, material.held_out, examine, rewrite)
    return Prepared(task, material, save, common.fingerprint(target))


def _earlier(config: Config, target: hf.Loaded) -> list[hf.Loaded]:
    """The draft models of ``config.boosted``. Raises UserError for another vocabulary."""
    where = common.placement(config)
    models = []
    for name in str(config.boosted).split(","):
        model = hf.load(name.strip(), dtype=jnp.float32, on_host=where.spread)
        check_vocabulary(target.lm, model.lm)
        models.append(model._replace(lm=in_size(model.lm, target.lm.vocab_size)))
    return models


def _plain(config: Config, workdir: Path, target: hf.Loaded) -> _Draft:
    """A decoder."""
    decoder, params = _layers(config, target)
    save = common.saver(workdir, hf.save, decoder, tokenizer=target.text_tokenizer)
    return _Draft(decoder, common.language_model(config, decoder), params, save)


def _spire(config: Config, workdir: Path, target: hf.Loaded) -> _Draft:
    """A decoder with the sparse attention and the memory of ``config.spire``."""
    if config.init and not config.pruned:
        shape, params = _load_spire(config, hf.fingerprint(target.text_tokenizer))
    else:
        decoder, params = _layers(config, target)
        shape = _spire_shape(config, decoder)
        params = with_memory(shape, params)
    save = common.saver(
        workdir, spire_model.save, shape, tokenizer=target.text_tokenizer, layers=config.pruned
    )
    model = common.language_model(config, shape, from_config)
    return _Draft(shape.decoder, model, params, save)


def _layers(config: Config, target: hf.Loaded) -> tuple[TransformerConfig, Any]:
    """The shape and the initial parameters: of ``config.pruned``, else of ``config.model``."""
    if config.pruned:
        shape, params = initial.pruned(target, config.pruned)
        if config.init:
            raise UserError(
                "config.init and config.pruned are both given; a draft starts from one of them"
            )
        return shape, params
    shapes.check(config.model)
    shapes.check_positions(config)
    shapes.check_kind(config, target)
    size = common.draft_vocabulary(config, target)
    bos, eos = target.config.bos_token_id, target.config.eos_token_id
    shape = shapes.new(config.model, size, bos, eos, shapes.ends_of(target))
    return shape, common.first_params(config, shape, hf.fingerprint(target.text_tokenizer))


def _pard(config: Config, target: hf.Loaded, model: LM) -> Drafter:
    """The drafter that is trained. Raises UserError for a wrong value of ``config.pard``."""
    keys = config_lib.read(PardKeys, config.pard)
    for other in ("boosted", "spire"):
        if config[other]:
            raise UserError(f"config.pard and config.{other} are both given; give one of them")
    common.check_longest(config, keys.tokens)
    return drafters.make(
        pard.NAME,
        target.lm,
        model=model._replace(vocabulary=target.lm.vocabulary),
        gamma=keys.tokens,
        mask_id=_mask_of(config, target),
        params={},
    )


def _mask_of(config: Config, target: hf.Loaded) -> int:
    """The id of the mask; without a key the last token of the vocabulary."""
    own = config.pard.get("mask_id")
    return target.lm.vocab_size - 1 if own is None else own


def _spire_shape(config: Config, decoder: TransformerConfig) -> SpireConfig:
    """The SPIRe model with these layers. Raises UserError for a wrong value of ``config.spire``."""
    keys = config_lib.read(SpireKeys, config.spire)
    shape = SpireConfig(decoder, **dataclasses.asdict(keys))
    check(shape, "config.spire.")
    return shape


def _load_spire(config: Config, vocabulary: str) -> tuple[SpireConfig, dict]:
    """The SPIRe model ``config.init``.

    Raises UserError if it has another tokenizer, or other values than ``config.spire``.
    """
    where = common.placement(config)
    loaded = spire_model.load(config.init, dtype=jnp.float32, on_host=where.spread)
    initial.check_tokenizer(loaded.directory, loaded.lm, vocabulary)
    shape = _spire_shape(config, loaded.config.decoder)
    if shape != loaded.config:
        key = next(
            key for key in config.spire if getattr(shape, key) != getattr(loaded.config, key)
        )
        raise UserError(
            f"config.spire.{key} is {getattr(shape, key)}, and the model config.init was trained "
            f"with {getattr(loaded.config, key)}; give this value"
        )
    return shape, loaded.params
