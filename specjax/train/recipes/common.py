"""What the objectives share: the prepared run, the target, models, and how they are stored."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from specjax import files, sharding
from specjax.config import Config
from specjax.data import feature_store, generated_text
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.models.transformer_config import TransformerConfig
from specjax.train import initial, objectives
from specjax.train.display import report
from specjax.train.loop import Task
from specjax.train.placement import Placement, place
from specjax.train.recipes.material import Material
from specjax.types import LM


class Prepared(NamedTuple):
    """A run that can start: what an objective makes of a configuration."""

    task: Task
    material: Material
    save: Callable[[Any, dict], None]  # writes <workdir>/model, and summary.json before it
    target: str | None = None  # fingerprint of the target's files


def placement(config: Config) -> Placement:
    """Where ``config.mesh`` stores arrays; a configuration without this key has "". UserError."""
    return place(config.get("mesh", ""))


def load_target(config: Config) -> hf.Loaded:
    """The target in float32; its ``lm`` computes in ``config.train.precision``.

    Its parameters are on the mesh if that divides them. Raises UserError if there is no target, it
    has no tokenizer or too few positions, or the mesh cannot divide it.
    """
    if not config.target:
        raise UserError(
            "config.target is empty; give a model directory, a name of the Hub, a .gguf file "
            "or a trained run's workdir"
        )
    # float32: parameters that are trained start from it. The loop casts what a loss reads.
    where = placement(config)
    target = hf.load(config.target, dtype=jnp.float32, on_host=where.spread)
    if target.tokenizer is None:
        raise UserError(
            f"{target.directory} has no tokenizer.json; text to train on needs a tokenizer"
        )
    if config.train.length > target.config.longest_text:
        raise UserError(
            f"config.train.length {config.train.length} is beyond the target's "
            f"{target.config.longest_text} positions"
        )
    if config.data.generated:
        writer = generated_text.target_fingerprint(config.data.generated)
        if writer not in (None, fingerprint(target)):
            report(
                f"note: {config.data.generated} was written by another model than "
                f"{target.directory}"
            )
    where.check_decoder("the target", target.config)
    params = where.put_params(target.params) if where.spread else target.params
    model = language_model(config, target.config)
    return target._replace(lm=model._replace(vocabulary=target.lm.vocabulary), params=params)


def fingerprint(target: hf.Loaded) -> str:
    """SHA-256 over the weight files and config.json of a model directory."""
    return feature_store.target_fingerprint(target.directory)


def language_model(config: Config, shape: TransformerConfig) -> LM:
    """A model in ``config.train.precision``, recomputing layers with ``config.train.remat``."""
    return lm.from_config(
        shape, jnp.dtype(config.train.precision), remat=config.train.get("remat", False)
    )


def draft_vocabulary(config: Config, target: hf.Loaded) -> int:
    """The size of the target's vocabulary. Raises UserError if config.model has another one."""
    size = target.config.vocab_size
    if config.model.vocab_size not in (0, size):
        raise UserError(
            f"config.model.vocab_size is {config.model.vocab_size}, but the target has {size} "
            "tokens; leave it 0, a draft model shares its target's vocabulary"
        )
    return size


def first_params(config: Config, shape: TransformerConfig, vocabulary: str) -> dict:
    """The parameters to start from: those of ``config.init``, else random ones."""
    where = placement(config)
    if config.init:
        return initial.load(config.init, shape, vocabulary, on_host=where.spread)
    return where.make(functools.partial(lm.init_params, shape), jax.random.key(config.seed))


def model_saver(
    workdir: Path,
    shape: TransformerConfig,
    tokenizer: Tokenizer,
    more: dict[str, Any] | None = None,
) -> Callable[[Any, dict], None]:
    """A function (params, summary) that writes summary.json and the model directory.

    ``more`` are further keys of its config.json.
    """

    def save(params, summary):
        write_json(workdir / "summary.json", summary)
        hf.save(workdir / "model", shape, params, tokenizer, more=more)

    return save


def make_loss(
    make: Callable[..., objectives.Loss], keys: Config, objective: str, *args: Any
) -> objectives.Loss:
    """``make(*args, **keys)``. Raises UserError for a key that it does not take."""
    parameters = inspect.signature(make).parameters.values()
    check_loss_keys(keys, [p.name for p in parameters if p.kind is p.KEYWORD_ONLY], objective)
    return make(*args, **keys.to_dict())


def check_loss_keys(keys: Mapping[str, Any], known: Any, what: str) -> None:
    """Raises UserError for a key of ``config.loss`` that is not in ``known``."""
    for key in keys:
        if key not in known:
            raise UserError(f"config.loss.{key} is not a key of the loss of {what}; leave it out")


def write_json(path: Path, value: Any) -> None:
    """``files.write_json``, by the first process only."""
    if sharding.is_first():
        files.write_json(path, value)


def as_json(config: Config) -> dict:
    """The configuration as plain JSON."""
    return json.loads(config.to_json())


def lasting(config: dict) -> dict:
    """Plain JSON without the keys that change no result beyond the order of sums."""
    return {key: value for key, value in config.items() if key != "mesh"}


@contextlib.contextmanager
def writing(workdir: Path) -> Iterator[None]:
    """Turns an error of the operating system into one line about ``workdir``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write into {workdir}: {error.strerror or error}; "
            "make room, or choose another --workdir"
        ) from None
