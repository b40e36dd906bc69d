"""Objective distill: a draft model that imitates the target (DistillSpec, 2310.08461)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.config import Config
from specjax.drafters.draft_models._small_model import check_vocabulary, in_size
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.spire.model import with_memory
from specjax.models.transformer_config import TransformerConfig
from specjax.train import boosting, initial, objectives, on_policy
from specjax.train.loop import Task
from specjax.train.recipes import checks, common, examined, pard, shapes, spire
from specjax.train.recipes import material as materials
from specjax.train.recipes.common import Prepared
from specjax.types import LM


class _Draft(NamedTuple):
    """The model that is trained."""

    decoder: TransformerConfig
    model: LM
    params: Any  # to start from
    save: Callable[[Any, dict], None]


def prepare(config: Config, workdir: Path) -> Prepared:
    """Makes the run. Raises UserError."""
    target = common.load_target(config)
    assert target.tokenizer is not None
    for key in ("spire", "pard"):
        if config.get(key) and target.lm.encoder is not None:
            raise UserError(
                f"{target.directory} is an encoder-decoder model, and config.{key} trains "
                "decoders; leave it out"
            )
    make = _spire if config.get("spire") else _plain
    decoder, model, params, save = make(config, workdir, target)
    if decoder.max_positions < config.train.length:
        raise UserError(
            f"config.train.length {config.train.length} is beyond the draft's "
            f"{decoder.max_positions} positions"
        )
    # The model may be made of the target's layers; config.model then is not read.
    if config.data.on_policy and model.encoder is None:
        checks.check_on_policy_prompt(config)
    parallel = pard.drafter_of(config, target, model) if config.get("pard") else None
    if parallel is None:
        loss = common.make_loss(objectives.distill_loss, config.loss, "distill", target.lm, model)
    else:
        loss, save = pard.loss(config, parallel), pard.saver(config, workdir, decoder, target)
    theirs = target.params
    if config.boosted:
        earlier = _earlier(config, target)
        loss = boosting.boosted(loss, [each.lm for each in earlier])
        theirs = {"target": theirs, "earlier": [each.params for each in earlier]}
    own = target.tokenizer, target.directory, shapes.ends_of(target)
    material = materials.gather(config, workdir, *own)
    rewrite = None
    if config.data.on_policy:
        rewrite = on_policy.rewriter(
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
    assert target.tokenizer is not None
    decoder, params = _layers(config, target)
    save = common.model_saver(workdir, decoder, target.tokenizer)
    return _Draft(decoder, common.language_model(config, decoder), params, save)


def _spire(config: Config, workdir: Path, target: hf.Loaded) -> _Draft:
    """A decoder with the sparse attention and the memory of ``config.spire``."""
    assert target.tokenizer is not None
    if config.init and not config.pruned:
        shape, params = spire.load(config, hf.fingerprint(target.tokenizer))
    else:
        decoder, params = _layers(config, target)
        shape = spire.shape_of(config, decoder)
        params = with_memory(shape, params)
    save = spire.saver(workdir, shape, target.tokenizer, config.pruned)
    return _Draft(shape.decoder, spire.language_model(config, shape), params, save)


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
    assert target.tokenizer is not None
    size = common.draft_vocabulary(config, target)
    bos, eos = target.config.bos_token_id, target.config.eos_token_id
    shape = shapes.new(config.model, size, bos, eos, shapes.ends_of(target))
    return shape, common.first_params(config, shape, hf.fingerprint(target.tokenizer))
