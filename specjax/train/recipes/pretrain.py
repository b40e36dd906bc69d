"""Objective pretrain: a model that learns text; a target, or a draft for ``config.target``.

A decoder learns plain text, an encoder-decoder model (``config.model.family`` "t5") pairs.

With keys in ``config.loss`` it also learns to exit at every layer (LayerSkip). With ``config.mtp``
it is trained together with heads for multi-token prediction.
"""

from __future__ import annotations

from pathlib import Path

from specjax.config import Config
from specjax.data import pairs, token_streams
from specjax.models import hf
from specjax.train import layer_skip, objectives
from specjax.train.loop import Task
from specjax.train.recipes import common, examined, mtp, shapes
from specjax.train.recipes import material as materials
from specjax.train.recipes.common import Prepared


def prepare(config: Config, workdir: Path) -> Prepared:
    """Makes the run. With a target, the model has the target's tokenizer. Raises UserError."""
    shapes.check(config.model)
    if config.get("mtp"):
        mtp.check(config)
    target = common.load_target(config) if config.target else None
    if target is None:
        tokenizer = materials.tokenizer(config, workdir)
        # A trained tokenizer may have fewer tokens than asked for; a model to start from more.
        size, ends = tokenizer.get_vocab_size(), None
        if config.init:
            size = max(size, config.model.vocab_size)
        if shapes.has_encoder(config.model):
            ends, bos, eos = pairs.ends_of(tokenizer), None, ()
        else:
            bos = token_streams.separator_id(tokenizer)
            eos = () if bos is None else (bos,)
    else:
        assert target.tokenizer is not None
        shapes.check_kind(config, target)
        tokenizer, size = target.tokenizer, common.draft_vocabulary(config, target)
        bos, eos = target.config.bos_token_id, target.config.eos_token_id
        ends = shapes.ends_of(target)
    shape = shapes.new(config.model, size, bos, eos, ends)
    directory = None if target is None else target.directory
    common.placement(config).check_decoder("config.model", shape)
    material = materials.gather(config, workdir, tokenizer, directory, ends)
    model = common.language_model(config, shape)
    examine = None if target is None else examined.draft_model(config, target, model, material)
    loss, batches = objectives.pretrain_loss(model), material.batches
    plain = None
    if config.loss and not config.get("mtp"):
        sizes = model, shape, config.train.steps, config.train.get("remat", False)
        make = layer_skip.layer_skip_loss
        plain, loss = loss, common.make_loss(make, config.loss, "pretrain", *sizes)
        batches = layer_skip.Numbered(batches)
    task = Task(
        loss,
        common.first_params(config, shape, hf.fingerprint(tokenizer)),
        {} if target is None else target.params,
        batches,
        material.held_out,
        examine,
        held_out_loss=plain,
    )
    save = common.model_saver(workdir, shape, tokenizer)
    if config.get("mtp"):
        own = model._replace(vocabulary=hf.fingerprint(tokenizer))
        made = hf.Loaded(own, task.params, shape, tokenizer, str(workdir / "model"))
        task, save = mtp.joined(config, task, save, made, material)
    return Prepared(task, material, save, None if target is None else common.fingerprint(target))
