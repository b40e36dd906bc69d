"""Objective distill: a draft model that imitates the target (DistillSpec, 2310.08461)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specjax.config import Config
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.transformer_config import TransformerConfig
from specjax.train import initial, objectives, on_policy
from specjax.train.loop import Task
from specjax.train.recipes import checks, common, examined
from specjax.train.recipes import material as materials
from specjax.train.recipes.common import Prepared


def prepare(config: Config, workdir: Path) -> Prepared:
    """Makes the run. Raises UserError."""
    target = common.load_target(config)
    assert target.tokenizer is not None
    shape, params = _draft(config, target)
    if shape.max_positions < config.train.length:
        raise UserError(
            f"config.train.length {config.train.length} is beyond the draft's "
            f"{shape.max_positions} positions"
        )
    model = common.language_model(config, shape)
    loss = common.make_loss(objectives.distill_loss, config.loss, "distill", target.lm, model)
    material = materials.gather(config, workdir, target.tokenizer, target.directory)
    rewrite = None
    if config.data.on_policy:
        rewrite = on_policy.rewriter(
            model,
            config.data.on_policy,
            config.data.on_policy_prompt,
            config.loss.get("temperature", 1.0),
        )
    examine = examined.draft_model(config, target, model, material)
    task = Task(loss, params, target.params, material.batches, material.held_out, examine, rewrite)
    save = common.model_saver(workdir, shape, target.tokenizer)
    return Prepared(task, material, save, common.fingerprint(target))


def _draft(config: Config, target: hf.Loaded) -> tuple[TransformerConfig, Any]:
    """The shape and the initial parameters: of ``config.pruned``, else of ``config.model``."""
    if config.pruned:
        shape, params = initial.pruned(target, config.pruned)
        if config.init:
            raise UserError(
                "config.init and config.pruned are both given; a draft starts from one of them"
            )
        return shape, params
    checks.check_shape(config.model)
    checks.check_positions(config)
    assert target.tokenizer is not None
    size = common.draft_vocabulary(config, target)
    bos, eos = target.config.bos_token_id, target.config.eos_token_id
    shape = common.decoder_shape(config.model, size, bos, eos)
    return shape, common.first_params(config, shape, hf.fingerprint(target.tokenizer))
