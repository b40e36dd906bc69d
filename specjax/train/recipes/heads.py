"""Objective heads: heads on a target's features; the target is frozen, or trained jointly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import checks, drafters, registry
from specjax.config import Config, given
from specjax.data.token_streams import most_frequent
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import objectives
from specjax.train.loop import Task
from specjax.train.objectives import QUIET, REMAT, RUN_STEPS
from specjax.train.placement import place
from specjax.train.recipes import common, examined, shapes
from specjax.train.recipes import material as materials
from specjax.train.recipes.common import Prepared
from specjax.train.recipes.material import Material
from specjax.types import Drafter, ModelParams, Training


def prepare(config: Config, workdir: Path) -> Prepared:
    """Makes the run; with ``config.joint`` the target is trained too. Raises UserError."""
    target = common.load_target(config)
    own = target.text_tokenizer, target.directory, shapes.ends_of(target)
    gather = functools.partial(materials.gather, config, workdir, *own)
    # A draft vocabulary depends on the text; other drafters are checked before the text is read.
    material = gather() if config.drafter.get("draft_vocab") else None
    drafter = _drafter(config, target, material)
    training = _training(drafter)
    if config.data.features and training.reads_tokens:
        raise UserError(
            f"config.data.features are not enough for {config.drafter.name}: its loss runs layers "
            "of the target on the rows; train it on the text itself"
        )
    _check_best(config, drafter, training)
    common.check_longest(config, drafter.longest)
    assert training.start is not None and training.loss is not None
    key = jax.random.key(config.seed)
    if config.init:
        draft = drafter.init_params(key)
    else:
        draft = place(config.mesh).make(training.start, target.params, key)
    common.check_savable(config.drafter.name, drafter, draft)
    params = {"target": target.params, "draft": draft} if config.joint else draft
    loss, held_out_loss = _losses(config, target, drafter, training)
    common.check_weights(config, loss, params, target.params)
    material = (gather() if material is None else material).tapped(drafter.taps)
    examine = examined.examiner(config, drafter, target, material, moving=config.joint)
    task = Task(loss, params, target.params, material.batches, material.held_out, examine)
    task = task._replace(held_out_loss=held_out_loss)
    save = _saver(config, workdir, target, drafter, material)
    return Prepared(task, material, save, common.fingerprint(target))


def _check_best(config: Config, drafter: Drafter, training: Training) -> None:
    best = config.train.best
    if best.startswith("heldout_tau") and training.foresee is None:
        raise UserError(
            f"config.train.best is {best!r}, a forecast, and drafts of {drafter.name} whose shape "
            "depends on the context have none; give "
            f"{best.replace('_tau', '_decoded_tau')!r}, or train with a chain"
        )


def _drafter(config: Config, target: hf.Loaded, material: Material | None) -> Drafter:
    """The drafter that is trained; ``material`` is needed for a draft vocabulary."""
    keys = given(config.drafter)
    if not keys.get("name"):
        raise UserError("config.drafter.name is empty; name a drafter, such as medusa")
    if keys.get("model"):
        raise UserError(
            "config.drafter.model is for finished heads; to start training from them give "
            "config.init"
        )
    if config.init and {"model", "dtype"} <= registry.keys_of(drafters.load(keys["name"])).keys():
        # The files also hold the shape of the heads.
        keys |= {"model": config.init, "dtype": jnp.float32}
    if material is not None:
        ids = _draft_ids(config, target, material)
        whole = len(ids) == target.lm.vocab_size
        keys |= {"draft_vocab": 0} if whole else {"draft_ids": ids}
    return drafters.make(target=target.lm, **keys)


def _draft_ids(config: Config, target: hf.Loaded, material: Material) -> np.ndarray:
    """i32[draft_vocab]: the most frequent labels of the text, and the tokens that end a text."""
    size = checks.whole("config.drafter.draft_vocab", config.drafter.draft_vocab, 1)
    if config.init:
        raise UserError(
            f"config.drafter.draft_vocab is {size}, and {config.init} has its draft vocabulary; "
            "leave draft_vocab out"
        )
    return most_frequent(material.counts, size, target.lm.vocab_size, target.config.eos_token_id)


def _training(drafter: Drafter) -> Training:
    training = drafter.training
    if training is None or training.start is None or training.loss is None:
        if drafter.name in head_files.kinds():
            raise UserError(
                f"drafter {drafter.name} has no parameters with these keys; give "
                "config.drafter.adapter or config.drafter.head=own"
            )
        raise UserError(
            f"drafter {drafter.name} has nothing to train; "
            f"drafters that have are {', '.join(head_files.kinds())}"
        )
    return training


def _losses(
    config: Config, target: hf.Loaded, drafter: Drafter, training: Training
) -> tuple[objectives.Loss, objectives.Loss | None]:
    """The loss of training, and that of held-out batches if it is another: without noise."""
    assert training.loss is not None
    arguments = objectives.keywords(training.loss)
    run = {RUN_STEPS: config.train.steps, REMAT: config.train.remat}
    if config.train.remat and REMAT not in arguments and not config.joint:
        raise UserError(f"the loss of {drafter.name} has no layers to recompute; leave remat out")
    known, make = set(arguments) - set(run), functools.partial(functools.partial, training.loss)
    if config.joint:
        known |= objectives.keywords(objectives.joint_loss).keys()
        make = functools.partial(objectives.joint_loss, target.lm, drafter)
    common.check_loss_keys(config.loss, known, drafter.name)
    weights = given(config.loss) | {key: value for key, value in run.items() if key in arguments}
    quiet = {key: value for key, value in QUIET.items() if key in known}
    if "places" in known and not arguments["places"].default:
        quiet["places"] = 0  # of losses whose usual places are all
    return make(**weights), make(**weights | quiet) if quiet else None


def _saver(
    config: Config, workdir: Path, target: hf.Loaded, drafter: Drafter, material: Material
) -> Callable[[Any, dict], None]:
    """A function (params, summary) that writes the directory of heads, and then summary.json.

    With ``config.joint`` it also writes <workdir>/target.
    """

    def save(params, summary):
        both = (params["target"], params["draft"]) if config.joint else (target.params, params)
        pair = ModelParams(*both)
        extra: dict[str, Any] = examined.accuracy(config, target, drafter, pair, material)
        base = Path(config.target)
        if config.joint:
            base = workdir / "target"
            hf.save(base, target.config, pair.target, target.text_tokenizer)
        if config.drafter.get("draft_vocab"):
            # The text that the draft vocabulary is from.
            extra["draft_vocab_text"] = material.digest
        common.write_heads(workdir / "model", target, drafter, pair.draft, base.name, extra)
        common.write_json(workdir / "summary.json", summary)

    return save
