"""What the objectives share: the prepared run, the target, models, and how they are stored."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import drafters, files, registry, sharding
from specjax.bench.results import check_no_training
from specjax.config import Config
from specjax.data import feature_store, generated_text
from specjax.drafters.files import head_files
from specjax.errors import UserError, on_disk
from specjax.files import buckets
from specjax.models import hf, lm
from specjax.models.transformer_config import TransformerConfig
from specjax.train import initial, objectives
from specjax.train.checkpoint import check_same
from specjax.train.display import report
from specjax.train.loop import Task
from specjax.train.objectives import check_loss_keys, keywords
from specjax.train.placement import place
from specjax.train.recipes import checks
from specjax.train.recipes.material import Material
from specjax.types import LM, Batch, Drafter


class Prepared(NamedTuple):
    """A run that can start: what an objective makes of a configuration."""

    task: Task
    material: Material
    save: Callable[[Any, dict], None]  # writes <workdir>/model, and summary.json before it
    target: str | None = None  # fingerprint of the target's files


def load_target(config: Config) -> hf.Loaded:
    """The target in float32; its ``lm`` computes in ``config.train.precision``.

    Its parameters are on the mesh if that divides them. Raises UserError if there is no target, it
    has no tokenizer or too few positions, or the mesh cannot divide it.
    """
    right = "a model directory, a name of the Hub, a .gguf file or a trained run's workdir"
    checks.check_target(config, right)
    # float32: parameters that are trained start from it. The loop casts what a loss reads.
    where = place(config.mesh)
    target = hf.load(config.target, dtype=jnp.float32, on_host=where.spread)
    _ = target.text_tokenizer  # raises if there is none
    check_positions(config, "the target", target.config.longest_text)
    if text := config.data.generated:
        writer = generated_text.target_fingerprint(text)
        if writer not in (None, fingerprint(target)):
            report(f"note: {text} was written by another model than {target.directory}")
    where.check_decoder("the target", target.config)
    params = where.put_params(target.params) if where.spread else target.params
    model = language_model(config, target.config)
    return target._replace(lm=model._replace(vocabulary=target.lm.vocabulary), params=params)


def fingerprint(target: hf.Loaded) -> str:
    """SHA-256 over the weight files and config.json of a model directory."""
    return feature_store.target_fingerprint(target.directory)


def language_model(config: Config, shape: Any, make: Callable[..., LM] = lm.from_config) -> LM:
    """A model in ``config.train.precision``, recomputing layers with ``config.train.remat``."""
    return make(shape, jnp.dtype(config.train.precision), remat=config.train.get("remat", False))


def draft_vocabulary(config: Config, target: hf.Loaded) -> int:
    """The size of the target's vocabulary. Raises UserError if config.model has another one."""
    size = target.config.vocab_size
    if config.model.vocab_size not in (0, size):
        raise UserError(
            f"config.model.vocab_size is {config.model.vocab_size}, but the target has {size} "
            "tokens; leave it 0, a draft model shares its target's vocabulary"
        )
    return size


def first_params(
    config: Config, shape: TransformerConfig, vocabulary: str
) -> tuple[TransformerConfig, dict]:
    """The shape and the parameters to start from: ``config.init``, else random ones."""
    where = place(config.mesh)
    if config.init:
        return initial.load(config.init, shape, vocabulary, on_host=where.spread)
    make = functools.partial(lm.init_params, shape)
    return shape, where.make(make, jax.random.key(config.seed))


def saver(
    workdir: Path, write: Callable[..., None], shape: Any, **keys: Any
) -> Callable[[Any, dict], None]:
    """A function (params, summary) that writes the model directory, and then summary.json."""

    def save(params, summary):
        write(workdir / "model", shape, params, **keys)
        write_json(workdir / "summary.json", summary)

    return save


def write_heads(
    folder: Path, target: hf.Loaded, drafter: Drafter, draft: Any, base: str, extra: dict[str, Any]
) -> None:
    """Writes a directory of heads for the model ``base``; ``extra`` as in ``head_files.write``."""
    assert drafter.training is not None
    facts = {"base_model_name_or_path": base, "vocab_size": target.lm.vocab_size}
    facts |= dict(drafter.training.facts)
    head_files.write(folder, drafter.name, draft, facts, target.lm.vocabulary, extra)


def check_positions(config: Config, whose: str, positions: int) -> None:
    """Raises UserError for training text that is longer than a model reads."""
    length = config.train.length
    if length > positions:
        raise UserError(f"config.train.length {length} is beyond {whose}'s {positions} positions")


def check_longest(config: Config, tokens: int) -> None:
    """Raises UserError for drafts that are not shorter than the training text."""
    if tokens >= config.train.length:
        raise UserError(
            f"a draft of {tokens} tokens looks beyond config.train.length {config.train.length}; "
            "raise it"
        )


def check_room(config: Config, head: int, positions: int) -> None:
    """Raises UserError if a prompt, after its ``head``, and its continuation do not fit."""
    length, new = config.generation.prompt_tokens, config.generation.new_tokens
    if head + length + new > positions:
        raise UserError(
            f"config.generation asks for {length} + {new} tokens and the model has {positions} "
            "positions; lower one of them"
        )


def check_weights(config: Config, loss: objectives.Loss, params: Any, target_params: Any) -> None:
    """Traces the loss, which raises UserError for invalid weights of its terms."""
    batch = Batch(jnp.zeros((1, config.train.length + 1), jnp.int32))
    jax.eval_shape(loss, params, target_params, batch, jax.random.key(0))


def make_loss(
    make: Callable[..., objectives.Loss], keys: Config, objective: str, *args: Any
) -> objectives.Loss:
    """``make(*args, **keys)``. Raises UserError for a key that it does not take."""
    return make(*args, **loss_keys(make, keys, objective))


def loss_keys(function: Callable, keys: Config, what: str) -> dict[str, Any]:
    """``config.loss``. Raises UserError for a key that is no keyword argument of the function."""
    check_loss_keys(keys, keywords(function), what)
    return keys.to_dict()


def write_json(path: Path, value: Any) -> None:
    """``files.write_json``, by the first process only."""
    if sharding.is_first():
        files.write_json(path, value)


def as_json(config: Config) -> dict:
    """The configuration as plain JSON, with addresses for paths in the copy of a workdir."""
    return buckets.addressed(json.loads(config.to_json()))


def lasting(config: dict) -> dict:
    """Plain JSON without the keys that change no result beyond the order of sums."""
    return {key: value for key, value in config.items() if key != "mesh"}


class Data(NamedTuple):
    """Data that an objective is about to write."""

    # Writes into a folder; returns the summary, and the keys of the manifest beyond the plan.
    write: Callable[[Path], tuple[dict, dict]]
    # All that the data depend on, which a resumed command must have in common.
    plan: dict | None = None
    save: Callable[[Path], None] | None = None  # writes the last files, in place of the manifest


def write_data(
    config: Config,
    workdir: Path,
    manifest: Path,
    prepare: Callable[[Config, Path], Data],
) -> dict:
    """Writes the data of an objective; returns their summary.

    Writes config.json, plan.json, the data, summary.json, and the manifest as the last file.
    Finished data are left unchanged. Raises UserError for a workdir with something else, and for
    another configuration or plan.
    """
    resolved, folder = as_json(config), manifest.parent
    check_no_training(workdir, manifest.name if folder == workdir else folder.name)
    if manifest.exists():
        if not all((workdir / name).exists() for name in ("config.json", "summary.json")):
            raise UserError(
                f"{workdir} holds a {manifest.stem} that this command did not make; "
                "choose another --workdir"
            )
        stored = lasting(files.read_json(workdir / "config.json"))
        check_same(stored, lasting(resolved), workdir)
        return files.read_json(workdir / "summary.json")
    write, plan, save = prepare(config, workdir)
    if plan is not None and (folder / "plan.json").exists():
        check_same(files.read_json(folder / "plan.json"), plan, workdir)
    with writing(workdir):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(workdir / "config.json", resolved)
        if plan is not None:
            write_json(folder / "plan.json", plan)
        summary, more = write(folder)
        write_json(workdir / "summary.json", summary)
        if plan is not None:
            write_json(manifest, plan | more)
        if save is not None:
            save(folder)
    return sharding.of_first(summary)


def writing(workdir: Path) -> contextlib.AbstractContextManager[None]:
    """Turns an error of the operating system into one line about ``workdir``."""
    return on_disk(f"cannot write into {workdir}", "make room, or choose another --workdir")


def check_savable(method: str, drafter: Drafter, params: Any) -> None:
    """Raises UserError for parameters that could not be saved after the training.

    Those of a drafter outside the package are saved under its name, as the tree that they are.
    """
    if registry.is_import(method):
        if drafter.name in drafters.names():
            raise UserError(
                f"{method} gives a drafter with the name {drafter.name}, which is one of specjax; "
                "give it a name of its own"
            )
        head_files.tree_tensors(drafter.name, params)
        assert drafter.training is not None
        try:
            json.dumps(dict(drafter.training.facts))
        except TypeError as error:
            raise UserError(f"the facts of {method} cannot be written as JSON: {error}") from None
