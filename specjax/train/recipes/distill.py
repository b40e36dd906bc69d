"""Objective distill: a draft model that imitates the target (DistillSpec, 2310.08461).

With ``config.drafter.name`` it is the draft model of a method that declares how it is trained
(``drafters.objectives.Distilled``): of another kind, or with a loss of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specjax import config as config_lib
from specjax import declare, drafters
from specjax.config import Config, given
from specjax.drafters.objectives import Distilled, distilled
from specjax.drafters.pairs import check_vocabulary, in_size
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.transformer_config import TransformerConfig
from specjax.train import initial, objectives, writer
from specjax.train.loop import Task
from specjax.train.placement import place
from specjax.train.recipes import checks, common, examined, shapes
from specjax.train.recipes import material as materials
from specjax.train.recipes.common import Prepared
from specjax.types import LM


def prepare(config: Config, workdir: Path) -> Prepared:
    """Makes the run. Raises UserError."""
    target = common.load_target(config)
    name, how, keys = _method(config)
    if name and target.lm.encoder is not None:
        raise UserError(
            f"{target.directory} is an encoder-decoder model, and config.drafter.name={name} "
            "trains decoders; leave it out"
        )
    if how.network is not None:
        decoder, model, params, save = _of_kind(config, workdir, target, how.network(), keys)
    else:
        decoder, params = _layers(config, target)
        model = common.language_model(config, decoder)
        save = common.saver(workdir, hf.save, decoder, tokenizer=target.text_tokenizer)
    common.check_positions(config, "the draft", decoder.max_positions)
    # The model may be made of the target's layers; config.model then is not read.
    if config.data.on_policy and model.encoder is None:
        checks.check_on_policy_prompt(config)
    own = None
    if how.drafter is not None:
        keys = how.drafter(target.lm, keys)
        common.check_longest(config, keys["gamma"])
        model_of = model._replace(vocabulary=target.lm.vocabulary)
        own = drafters.make(name, target.lm, model=model_of, params={}, **keys)
        assert own.training is not None and own.training.loss is not None
        loss = own.training.loss
        loss = functools.partial(loss, **common.loss_keys(loss, config.loss, name))
        more = how.facts(keys) if how.facts else {}
        save = common.saver(workdir, hf.save, decoder, tokenizer=target.text_tokenizer, more=more)
    else:
        loss = common.make_loss(objectives.distill_loss, config.loss, "distill", target.lm, model)
    theirs = target.params
    if config.boosted:
        earlier = _earlier(config, target)
        loss = objectives.boosted(loss, [each.lm for each in earlier])
        theirs = {"target": theirs, "earlier": [each.params for each in earlier]}
    material = materials.gather(
        config, workdir, target.text_tokenizer, target.directory, shapes.ends_of(target)
    )
    rewrite = None
    if config.data.on_policy:
        share, prompt = config.data.on_policy, config.data.on_policy_prompt
        temperature = config.loss.get("temperature", 1.0)
        rewrite = writer.rewriter(model, share, prompt, temperature, target.config.eos_token_id)
    if own is None:
        examine = examined.draft_model(config, target, model, material)
    else:
        examine = examined.examiner(config, own, target, material)
    task = Task(loss, params, theirs, material.batches, material.held_out, examine, rewrite)
    return Prepared(task, material, save, common.fingerprint(target))


def _method(config: Config) -> tuple[str, Distilled, Any]:
    """The name of the method whose draft model is trained, how it is, and ``Distilled.keys``.

    Without a name a plain decoder is. Raises UserError for a method that is not trained here.
    """
    keys = given(config.drafter)
    if not keys:
        return "", Distilled(declare.Keys), None
    name = keys.pop("name", "")
    how = distilled(name) if name else None
    if how is None:
        known = [each for each in drafters.names() if distilled(each)]
        raise UserError(
            f"config.drafter.name is {name!r}; objective distill trains the draft models of "
            f"{', '.join(known)}, and without config.drafter a plain decoder"
        )
    if config.boosted and how.drafter is not None:
        raise UserError(
            f"config.drafter.name={name} and config.boosted are both given; give one of them"
        )
    return name, how, config_lib.read(how.keys, keys)


def _earlier(config: Config, target: hf.Loaded) -> list[hf.Loaded]:
    """The draft models of ``config.boosted``. Raises UserError for another vocabulary."""
    where = place(config.mesh)
    models = []
    for name in str(config.boosted).split(","):
        model = hf.load(name.strip(), dtype=jnp.float32, on_host=where.spread)
        check_vocabulary(target.lm, model.lm)
        models.append(model._replace(lm=in_size(model.lm, target.lm.vocab_size)))
    return models


def _of_kind(
    config: Config, workdir: Path, target: hf.Loaded, kind: Any, keys: Any
) -> tuple[TransformerConfig, LM, Any, Callable[[Any, dict], None]]:
    """A draft model of another kind, ``Distilled.network``.

    Its decoder, the model, the parameters to start from, and how it is stored.
    """
    if config.init and not config.pruned:
        shape, params = _load(config, hf.fingerprint(target.text_tokenizer), kind, keys)
    else:
        decoder, params = _layers(config, target)
        shape = kind.shape_of(decoder, keys)
        params = kind.with_memory(shape, params)
    save = common.saver(
        workdir, kind.save, shape, tokenizer=target.text_tokenizer, layers=config.pruned
    )
    model = common.language_model(config, shape, kind.from_config)
    return shape.decoder, model, params, save


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
    return common.first_params(config, shape, hf.fingerprint(target.text_tokenizer))


def _load(config: Config, vocabulary: str, kind: Any, keys: Any) -> tuple[Any, dict]:
    """The draft model ``config.init``.

    Raises UserError if it has another tokenizer, or other values than ``config.drafter``.
    """
    where = place(config.mesh)
    loaded = kind.load(config.init, dtype=jnp.float32, on_host=where.spread)
    initial.check_tokenizer(loaded.directory, loaded.lm, vocabulary)
    stored, shape = loaded.config, kind.shape_of(loaded.config.decoder, keys)
    if shape != stored:
        key = next(name for name in vars(keys) if getattr(shape, name) != getattr(stored, name))
        raise UserError(
            f"config.drafter.{key} is {getattr(shape, key)}, and the model config.init was trained "
            f"with {getattr(stored, key)}; give this value"
        )
    return shape, loaded.params
