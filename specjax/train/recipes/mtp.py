"""``config.mtp`` of objective pretrain: the target is trained together with its heads.

``mtp`` has further last layers (Gloeckle et al. 2024), ``mtp_module`` DeepSeek's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import drafters
from specjax.config import Config, given
from specjax.drafters.heads import mtp
from specjax.errors import UserError
from specjax.models import head_files, hf
from specjax.train import layer_skip, stages, with_heads
from specjax.train.loop import Task
from specjax.train.recipes import common, examined
from specjax.train.recipes.material import Material
from specjax.types import Batch, Drafter, ModelParams, Params

# Method -> keys of its loss without which its labels would not be the text.
METHODS: dict[str, dict[str, Any]] = {
    mtp.NAME: {},
    "mtp_module": {"ce": 1.0, "weight": 0.0},
}


class Joined(NamedTuple):
    """A target with its heads, and how both are stored."""

    task: Task
    save: Callable[[Any, dict], None]


def check(config: Config) -> None:
    """Checks ``config.mtp`` before text is read. Raises UserError."""
    name = config.mtp.get("name")
    if name not in METHODS:
        raise UserError(
            f"config.mtp.name is {name!r}; it must be one of {', '.join(METHODS)}, with which a "
            "target is pretrained"
        )
    if config.target:
        raise UserError(
            "config.mtp trains a target together with its heads, and config.target is given too; "
            "leave config.target out (configs/mtp.py and mtp_heads.py train beside a target)"
        )
    for key in ("model", "params"):
        if config.mtp.get(key) is not None:
            raise UserError(f"config.mtp.{key} is for finished heads; leave it out")
    if (weight := config.mtp.get("weight")) is not None:
        stages.parse("config.mtp.weight", weight)


def joined(
    config: Config, task: Task, save: Callable[..., None], target: hf.Loaded, material: Material
) -> Joined:
    """The run of a target with heads, made of that of the target alone.

    ``save`` writes the target. Raises UserError.
    """
    keys = given(config.mtp)
    weight = keys.pop("weight", None)
    drafter = drafters.make(target=target.lm, **keys)
    assert drafter.training is not None and drafter.training.loss is not None
    draft = _start(config, drafter, target)
    count = len(next(iter(draft.values())))
    weight = stages.parse("config.mtp.weight", count if weight is None else weight)
    common.check_loss_keys(config.loss, _keys(drafter), f"{drafter.name} with a target")
    weights = METHODS[drafter.name] | config.loss.to_dict()
    # With ``slots`` "one" the heads' loss is a mean over them already; modules may be unrolled
    # for more steps than there are modules.
    steps = weights.get("steps")
    parts = max(count, steps) if type(steps) is int else count
    parts = 1 if weights.get("slots") == "one" else parts
    loss = with_heads.joint(target.lm, drafter, parts, weight, config.train.steps, weights)
    if drafter.longest >= config.train.length:
        raise UserError(
            f"a draft of {drafter.longest} tokens looks beyond config.train.length "
            f"{config.train.length}; raise it"
        )
    params = {"target": task.params, "draft": draft}
    # Tracing the loss finds invalid weights of its terms.
    batch = Batch(jnp.zeros((1, config.train.length + 1), jnp.int32))
    jax.eval_shape(loss, params, {}, batch, jax.random.key(0))
    task = task._replace(
        loss=loss,
        params=params,
        batches=layer_skip.Numbered(task.batches),
        examine=examined.examiner(config, drafter, target, material, moving=True),
        held_out_loss=with_heads.of_target(loss),
    )
    return Joined(task, _saver(config, save, drafter, target, material))


def _keys(drafter: Drafter) -> list[str]:
    """The keys of the heads' loss that fit labels from the text."""
    known = ("decay", "slots") if drafter.name == mtp.NAME else ("steps", "decay", "detach")
    return list(known)


def _start(config: Config, drafter: Drafter, target: hf.Loaded) -> Params:
    """The heads' first parameters: random ones beside a random target."""
    key, make = jax.random.fold_in(jax.random.key(config.seed), 1), common.placement(config).make
    if drafter.name == mtp.NAME and not config.init:
        heads = config.mtp.get("heads") or mtp.HEADS
        return make(lambda key: mtp.new(target.lm, key, heads), key)
    assert drafter.training is not None and drafter.training.start is not None
    return make(drafter.training.start, target.params, key)


def _saver(
    config: Config,
    save_target: Callable[..., None],
    drafter: Drafter,
    target: hf.Loaded,
    material: Material,
) -> Callable[[Any, dict], None]:
    """A function (params, summary) that writes <workdir>/heads, then what ``save_target`` does."""
    training, tokenizer = drafter.training, target.tokenizer
    assert training is not None and tokenizer is not None
    directory = Path(target.directory)

    def save(params, summary):
        extra, pair = {}, ModelParams(params["target"], params["draft"])
        if material.prompts and training.ranks is not None:
            extra["accuracy"] = examined.accuracy(config, target, drafter, pair, material)
        facts = {"base_model_name_or_path": directory.name, **dict(training.facts)}
        head_files.write(
            directory.parent / "heads",
            drafter.name,
            params["draft"],
            facts,
            hf.fingerprint(tokenizer),
            extra,
        )
        save_target(params["target"], summary)

    return save
