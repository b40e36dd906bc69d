"""Parameters to start training from: a pruned target, or a model directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.models.t5_config import T5Config
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM


def pruned(target: hf.Loaded, layers: str) -> tuple[TransformerConfig, dict]:
    """A draft made of some layers of the target; embeddings, norm and head are copied.

    DistillSpec's alternative to a smaller model (2310.08461).

    Args:
        target: a loaded model.
        layers: the numbers of the layers to keep, ascending: "0,3".

    Raises UserError for other layer numbers.
    """
    total = target.config.num_layers
    example = f"0,{total - 1}" if total > 1 else "0"
    try:
        kept = [int(part) for part in str(layers).split(",")]
    except ValueError:
        kept = []
    if not kept or any(not 0 <= layer < total for layer in kept) or sorted(set(kept)) != kept:
        raise UserError(
            f"config.pruned is {layers!r}; give ascending layer numbers in 0..{total - 1}, "
            f"such as {example}"
        )
    every: dict[Any, Any] = target.params["layers"]
    key = type(next(iter(every)))
    params = target.params | {"layers": {key(new): every[key(old)] for new, old in enumerate(kept)}}
    return _renumbered(target.config, kept), jax.tree.map(jnp.asarray, params)


def _renumbered(config: TransformerConfig, kept: Sequence[int]) -> TransformerConfig:
    """The shape of these layers alone: what names layers has their new numbers."""

    def new(layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(place for place, layer in enumerate(kept) if layer in layers)

    def part(own: Any) -> Any:
        """What some layers have; None where none of them is left."""
        layers = new(own.layers) if own else ()
        return dataclasses.replace(own, layers=layers) if own and layers else None

    windows = tuple(config.window(layer) for layer in kept) if config.windows else ()
    return dataclasses.replace(
        config,
        num_layers=len(kept),
        windows=windows if any(window is not None for window in windows) else (),
        unrotated=new(config.unrotated),
        without_mlp=new(config.without_mlp),
        experts=part(config.experts),
        recurrent=part(config.recurrent),
    )


def load(
    directory: str, config: TransformerConfig, vocabulary: str, on_host: bool = False
) -> tuple[TransformerConfig, dict]:
    """The model ``config.init``: its configuration, and its float32 parameters.

    What the shapes of ``config`` do not show (rotary base, scaling, windows, ...) is the model's
    own. ``vocabulary`` is the fingerprint of the tokenizer; ``on_host`` as in ``hf.load``. Raises
    UserError if the model has another shape or another tokenizer; a T5 model also for other values
    of its configuration.
    """
    loaded = hf.load(directory, dtype=jnp.float32, on_host=on_host)
    check_tokenizer(loaded.directory, loaded.lm, vocabulary)
    expected = jax.tree.map(jnp.shape, lm.abstract_params(config))
    if expected != jax.tree.map(jnp.shape, loaded.params):
        raise UserError(
            f"config.init {loaded.directory} is a model of another shape than config.model; "
            "set config.model to its shape"
        )
    if isinstance(config, T5Config):
        _check_same(loaded, config)
    kept = ("bos_token_id", "eos_token_id", "max_positions")
    own = {name: getattr(config, name) for name in kept if hasattr(config, name)}
    return dataclasses.replace(loaded.config, **own), loaded.params


def check_tokenizer(directory: str, model: LM, vocabulary: str) -> None:
    """Raises UserError if the model ``config.init`` has another tokenizer than this one."""
    if model.vocabulary not in (None, vocabulary):
        raise UserError(
            f"config.init {directory} has another tokenizer; give a model with the same one"
        )


def _check_same(loaded: hf.Loaded, config: T5Config) -> None:
    """Raises UserError for what the shapes of parameters do not show: special tokens, distances."""
    for field in dataclasses.fields(config):
        own, other = getattr(config, field.name), getattr(loaded.config, field.name)
        if own != other:
            raise UserError(
                f"config.init {loaded.directory} has {field.name} {other!r}, and the model to be "
                f"trained {own!r}; give its keys in config.model and its tokenizer"
            )
