"""What training begins with: the shape of a decoder, and parameters that are random, pruned from the target, or given."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.config import Config
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.models.transformer import TransformerConfig

PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def shape(model: Config, vocab_size: int, bos: int | None, eos: tuple[int, ...]) -> TransformerConfig:
    """The decoder of ``config.model``."""
    gpt2 = model.family == "gpt2"
    return TransformerConfig(
        **{**model.to_dict(), "vocab_size": vocab_size},
        head_dim=model.hidden_size // model.num_heads,
        attention_bias=gpt2,
        mlp_bias=gpt2,
        bos_token_id=bos,
        eos_token_id=eos,
    )


def check_shape(model: Config) -> None:
    """Raises UserError unless ``config.model`` is a decoder."""
    if model.family not in ("llama", "gpt2"):
        raise UserError(f"config.model.family is {model.family!r}; it must be 'llama' or 'gpt2'")
    for name, value in model.items():
        if isinstance(value, int) and value < 1 and name not in ("vocab_size", "tie_embeddings"):
            raise UserError(f"config.model.{name} is {value}; it must be at least 1")
    for whole, part, unit in (("hidden_size", "num_heads", 2), ("num_heads", "num_kv_heads", 1)):
        if model[whole] % (model[part] * unit):  # rotary positions turn pairs
            told = f"config.model.{whole} {model[whole]} is no {'even ' * (unit - 1)}multiple of {part} {model[part]}"
            raise UserError(f"{told}; change one of them")


def pruned(target: hf.Loaded, layers: str) -> tuple[TransformerConfig, dict]:
    """A draft that is the target without most of its layers: ``layers`` are those it keeps, "0,3", in that order.

    Everything else is copied: embeddings, norm, head. DistillSpec's alternative to a smaller model of one's own. UserError.
    """
    total = target.config.num_layers
    try:
        kept = [int(part) for part in str(layers).split(",")]
    except ValueError:
        kept = []
    if not kept or any(not 0 <= layer < total for layer in kept) or sorted(set(kept)) != kept:
        raise UserError(f"config.pruned is {layers!r}; give ascending layer numbers in 0..{total - 1}, such as 0,{total - 1}")
    names = list(target.params["layers"])
    by_number = {int(name): target.params["layers"][name] for name in names}
    key = type(names[0])
    layers_kept = {key(new): by_number[old] for new, old in enumerate(kept)}
    params = {**target.params, "layers": layers_kept}
    return dataclasses.replace(target.config, num_layers=len(kept)), jax.tree.map(jnp.asarray, params)


def given(directory: str, config: TransformerConfig, what: str) -> dict:
    """The float32 parameters of the model ``config.init``, which must have this shape. Raises UserError."""
    loaded = hf.load(directory, dtype=jnp.float32)
    ours, theirs = (jax.tree.map(jnp.shape, p) for p in (lm.abstract_params(config), loaded.params))
    if ours != theirs:
        raise UserError(f"config.init {loaded.directory} is a model of another shape than {what}; give config.model its shape")
    return loaded.params


def cast(params, precision: str):
    """Floating leaves in the precision that losses see."""
    dtype = PRECISIONS[precision]
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
