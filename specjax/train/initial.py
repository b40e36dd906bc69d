"""What training begins with: numbers that can be, a shape, and parameters: random, pruned from the target, or given."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.config import Config
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.models.transformer import TransformerConfig

PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def check_positions(config: Config) -> None:
    """Raises UserError if what is trained on is longer than the decoder of ``config.model`` can read."""
    if config.train.length > config.model.max_positions:
        raise UserError(
            f"config.train.length {config.train.length} is beyond config.model.max_positions {config.model.max_positions}"
        )


def check(config: Config) -> None:
    """Finds what is wrong with the numbers before anything is built or written."""
    train, look = config.train, config.examine
    for group, values, zero in (
        ("train", train, ("ema",)),
        ("examine", look, ("prompts",)),
    ):
        for name, value in values.items():
            least = 0 if name in zero else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise UserError(f"config.{group}.{name} is {value}; it must be at least {least}")
    if not 0 <= config.seed < 2**32:
        raise UserError(f"config.seed is {config.seed}; it must be in 0..{2**32 - 1}")
    if not 0 <= train.ema < 1:
        raise UserError(f"config.train.ema is {train.ema}; it must be at least 0 (off) and below 1")
    if train.keep not in ("last", "best"):
        raise UserError(f"config.train.keep is {train.keep!r}; it must be 'last' or 'best'")
    if look.prompts:
        if not look.temperatures:
            raise UserError(
                "config.examine.temperatures is empty; give one or more, or config.examine.prompts=0"
            )
        for temperature in look.temperatures:
            if isinstance(temperature, bool) or not isinstance(temperature, int | float):
                raise UserError(f"config.examine.temperatures has {temperature!r}; give numbers")
            sampling.make_sampling(1, temperature)
    parts = train.accumulate * jax.local_device_count()
    if train.batch_size % parts:
        raise UserError(
            f"config.train.batch_size is {train.batch_size}; it must be a multiple of accumulate * local devices = {parts}"
        )
    if train.precision not in PRECISIONS:
        raise UserError(
            f"config.train.precision is {train.precision!r}; it must be {' or '.join(PRECISIONS)}"
        )
    if not 0 <= config.data.on_policy <= 1:
        raise UserError(
            f"config.data.on_policy is {config.data.on_policy}; it must be a share of the rows, in [0, 1]"
        )
    if config.data.on_policy and config.objective != "distill":
        raise UserError("config.data.on_policy belongs to objective distill; leave it 0")
    if config.data.on_policy and not 0 < config.data.on_policy_prompt < train.length:
        told = f"config.data.on_policy_prompt is {config.data.on_policy_prompt}"
        raise UserError(
            f"{told}; it must be at least 1 and below config.train.length {train.length}"
        )
    for name in ("pruned", "joint"):
        if config.get(name) and config.objective != {"pruned": "distill", "joint": "heads"}[name]:
            raise UserError(
                f"config.{name} does not belong to objective {config.objective}; leave it out"
            )
    if config.objective == "pretrain":
        if config.target and config.tokenizer:
            raise UserError(
                "config.tokenizer and config.target are both given; a draft has its target's tokenizer"
            )
        if look.prompts and not config.target:
            raise UserError(
                "config.examine.prompts needs a target to draft for; give config.target, or leave it 0"
            )
        check_shape(config.model)
        check_positions(config)


def shape(
    model: Config, vocab_size: int, bos: int | None, eos: tuple[int, ...]
) -> TransformerConfig:
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
    usual = f"0,{total - 1}" if total > 1 else "0"
    try:
        kept = [int(part) for part in str(layers).split(",")]
    except ValueError:
        kept = []
    if not kept or any(not 0 <= layer < total for layer in kept) or sorted(set(kept)) != kept:
        raise UserError(
            f"config.pruned is {layers!r}; give ascending layer numbers in 0..{total - 1}, such as {usual}"
        )
    names = list(target.params["layers"])
    by_number = {int(name): target.params["layers"][name] for name in names}
    key = type(names[0])
    layers_kept = {key(new): by_number[old] for new, old in enumerate(kept)}
    params = {**target.params, "layers": layers_kept}
    return dataclasses.replace(target.config, num_layers=len(kept)), jax.tree.map(
        jnp.asarray, params
    )


def given(directory: str, config: TransformerConfig, vocabulary: str) -> dict:
    """The float32 parameters of the model ``config.init``, which must have this shape and these words. Raises UserError."""
    loaded = hf.load(directory, dtype=jnp.float32)
    if loaded.lm.vocabulary not in (None, vocabulary):
        raise UserError(
            f"config.init {loaded.directory} has another tokenizer; begin with a model of the same words"
        )
    ours, theirs = (jax.tree.map(jnp.shape, p) for p in (lm.abstract_params(config), loaded.params))
    if ours != theirs:
        raise UserError(
            f"config.init {loaded.directory} is a model of another shape than config.model; give it its shape"
        )
    return loaded.params


def cast(params, precision: str):
    """Floating leaves in the precision that losses see."""
    dtype = PRECISIONS[precision]
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )
