"""Objective pretrain: a model that learns text; a target, or a draft for ``config.target``.

A decoder learns plain text, an encoder-decoder model (``config.model.family`` "t5") pairs.

With keys in ``config.loss`` it also learns to exit at every layer (LayerSkip). With
``config.drafter.name`` it is trained together with heads of a method that declares how
(``drafters.objectives.Pretrained``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from specjax import drafters
from specjax.config import Config, given
from specjax.data import pairs, token_streams
from specjax.drafters.objectives import pretrained
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import layer_skip, objectives, with_heads
from specjax.train.loop import Task
from specjax.train.placement import place
from specjax.train.recipes import common, examined, shapes
from specjax.train.recipes import material as materials
from specjax.train.recipes.common import Prepared
from specjax.train.recipes.material import Material
from specjax.types import Drafter, ModelParams, Params


def prepare(config: Config, workdir: Path) -> Prepared:
    """Makes the run. With a target, the model has the target's tokenizer. Raises UserError."""
    if given(config.drafter):
        _check_heads(config)
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
        shapes.check_kind(config, target)
        tokenizer, size = target.text_tokenizer, common.draft_vocabulary(config, target)
        bos, eos = target.config.bos_token_id, target.config.eos_token_id
        ends = shapes.ends_of(target)
    shape = shapes.new(config.model, size, bos, eos, ends)
    directory = None if target is None else target.directory
    place(config.mesh).check_decoder("config.model", shape)
    material = materials.gather(config, workdir, tokenizer, directory, ends)
    shape, params = common.first_params(config, shape, hf.fingerprint(tokenizer))
    model = common.language_model(config, shape)
    examine = None if target is None else examined.draft_model(config, target, model, material)
    loss, batches = objectives.pretrain_loss(model), material.batches
    plain = None
    if config.loss and not given(config.drafter):
        sizes = model, shape, config.train.steps, config.train.remat
        make = layer_skip.layer_skip_loss
        plain, loss = loss, common.make_loss(make, config.loss, "pretrain", *sizes)
    theirs = {} if target is None else target.params
    task = Task(loss, params, theirs, batches, material.held_out, examine, held_out_loss=plain)
    save = common.saver(workdir, hf.save, shape, tokenizer=tokenizer)
    if given(config.drafter):
        own = model._replace(vocabulary=hf.fingerprint(tokenizer))
        made = hf.Loaded(own, params, shape, tokenizer, str(workdir / "model"))
        task, save = _joined(config, task, save, made, material)
    return Prepared(task, material, save, None if target is None else common.fingerprint(target))


def _check_heads(config: Config) -> None:
    """Checks ``config.drafter`` before text is read. Raises UserError."""
    name = config.drafter.get("name")
    if not name or pretrained(name) is None:
        known = [each for each in drafters.names() if pretrained(each)]
        raise UserError(
            f"config.drafter.name is {name!r}; it must be one of {', '.join(known)}, with which a "
            "target is pretrained"
        )
    if config.target:
        raise UserError(
            f"config.drafter.name={name} trains a target together with its heads, and "
            "config.target is given too; leave config.target out (objective heads trains beside a "
            "target)"
        )
    if config.drafter.get("model") is not None:
        raise UserError("config.drafter.model is for finished heads; leave it out")
    if (weight := config.drafter.get("weight")) is not None:
        with_heads.parse("config.drafter.weight", weight)


def _joined(
    config: Config, task: Task, save: Callable[..., None], target: hf.Loaded, material: Material
) -> tuple[Task, Callable[[Any, dict], None]]:
    """The run of a target with heads and how both are stored, made of that of the target alone.

    ``save`` writes the target. Raises UserError.
    """
    keys = given(config.drafter)
    weight = keys.pop("weight", None)
    drafter, how = drafters.make(target=target.lm, **keys), pretrained(keys["name"])
    assert how is not None and drafter.training is not None and drafter.training.loss is not None
    draft = _first_heads(config, drafter, target, how.first, keys)
    count = len(next(iter(draft.values())))
    common.check_loss_keys(config.loss, how.allowed, f"{drafter.name} with a target")
    weights = {**how.loss, **config.loss.to_dict()}
    # With ``slots`` "one" the heads' loss is a mean over them already; modules may be unrolled
    # for more steps than there are modules.
    steps = weights.get("steps")
    parts = max(count, steps) if type(steps) is int else count
    weight = with_heads.parse("config.drafter.weight", parts if weight is None else weight)
    parts = 1 if weights.get("slots") == "one" else parts
    loss = with_heads.joint(target.lm, drafter, parts, weight, config.train.steps, weights)
    common.check_longest(config, drafter.longest)
    params = {"target": task.params, "draft": draft}
    common.check_weights(config, loss, params, {})
    task = task._replace(
        loss=loss,
        params=params,
        examine=examined.examiner(config, drafter, target, material, moving=True),
        held_out_loss=with_heads.of_target(loss),
    )

    def save_both(params, summary):
        """Writes <workdir>/heads, then what ``save`` does."""
        pair = ModelParams(params["target"], params["draft"])
        extra = examined.accuracy(config, target, drafter, pair, material)
        own = Path(target.directory)
        common.write_heads(own.parent / "heads", target, drafter, pair.draft, own.name, extra)
        save(params["target"], summary)

    return task, save_both


def _first_heads(
    config: Config, drafter: Drafter, target: hf.Loaded, first: Any, keys: dict[str, Any]
) -> Params:
    """The heads' first parameters: random ones beside a random target, if ``first`` makes them."""
    key, make = jax.random.fold_in(jax.random.key(config.seed), 1), place(config.mesh).make
    if first is not None and not config.init:
        return make(lambda key: first(target.lm, key, keys), key)
    assert drafter.training is not None and drafter.training.start is not None
    return make(drafter.training.start, target.params, key)
