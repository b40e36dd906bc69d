"""The models of experiments/accelerator: their shapes, random weights, and sizes in bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bench.passes import Job
from specjax.models import lm
from specjax.models.transformer_config import RopeScaling, TransformerConfig

SMALL = TransformerConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_positions=131072,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", 32.0, 8192),
)
LARGE = dataclasses.replace(
    SMALL,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    head_dim=128,
    tie_embeddings=False,
    rope_scaling=RopeScaling("llama3", 8.0, 8192),
)
TINY = dataclasses.replace(
    SMALL,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
CHUNK = 256  # tokens of a prompt that prefill feeds at once


class Scale(NamedTuple):
    """The sizes of all measurements."""

    models: dict[str, TransformerConfig]
    batches: tuple[int, int] = (1, 8)
    prompt: int = 128
    new: int = 128
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    trees: tuple[int, ...] = (8, 32, 64)
    gammas: tuple[int, ...] = (1, 2, 4, 8)
    rates: tuple[float, ...] = (0.3, 0.6, 0.8, 0.95)
    passes: int = 3
    copy: int = 1 << 30  # elements of 2 bytes
    # Plain decoding after long prompts.
    contexts: tuple[int, ...] = (1024, 8192)
    context_batches: tuple[int, ...] = (1, 8, 64)

    @property
    def middle_gamma(self) -> int:
        """The draft length of the sections that measure only one."""
        return self.gammas[len(self.gammas) // 2]


def scale(tiny: bool) -> Scale:
    """The sizes of the study, or of its test."""
    if not tiny:
        return Scale({"1b": SMALL, "8b": LARGE})
    return Scale(
        models={"1b": TINY, "8b": dataclasses.replace(TINY, num_layers=2, tie_embeddings=False)},
        batches=(1, 2),
        prompt=16,
        new=16,
        sizes=(1, 4),
        trees=(4,),
        gammas=(2,),
        rates=(0.3, 0.95),
        passes=1,
        copy=1 << 20,
        contexts=(32,),
        context_batches=(2,),
    )


def draft_shape(name: str, models: Mapping[str, TransformerConfig]) -> TransformerConfig:
    """The draft of a size: 1B for 8B, and two layers of 1B for 1B."""
    config = models["1b"]
    return (
        config
        if name == "8b"
        else dataclasses.replace(config, num_layers=min(2, config.num_layers))
    )


def weights(config: TransformerConfig, seed: int) -> dict:
    """Random bfloat16 parameters, made on the device leaf by leaf: equal shapes compile once.

    The embeddings are large compared with the layers, so that bfloat16's rounding never decides
    the greedy token.
    """

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key, shape, spread):
        return (spread * jax.random.normal(key, shape, jnp.bfloat16)).astype(jnp.bfloat16)

    leaves, tree = jax.tree.flatten(lm.abstract_params(config, jnp.bfloat16))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = [
        normal(key, leaf.shape, 0.02) if leaf.ndim > 1 else jnp.ones(leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    params = jax.tree.unflatten(tree, made)
    spread = 8 * math.sqrt(config.num_layers)
    params["embed"]["embedding"] = normal(keys[0], params["embed"]["embedding"].shape, spread)
    # The next token is the next id; with tied embeddings it is the same token again.
    if not config.tie_embeddings:
        params["head"]["kernel"] = jnp.roll(params["embed"]["embedding"].T, 1, axis=1) / spread
    return params


def make_job(config: TransformerConfig, params: dict, batch: int, size: Scale) -> Job:
    """Greedy decoding of one batch of random prompts."""
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (batch, size.prompt)).tolist()
    return Job(
        target=lm.from_config(config, jnp.dtype(jnp.bfloat16)),
        params=params,
        prompts=prompts,
        settings={"temperature": 0.0},
        batch_size=batch,
        max_new_tokens=size.new,
        eos_id=(),
        seed=0,
        repeats=size.passes,
    )


def _cache_bytes(config: TransformerConfig, tokens: float) -> float:
    """Bytes of the keys and values of so many tokens."""
    return tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


def bytes_per_step(config: TransformerConfig, params: dict, batch: int, length: float) -> float:
    """Bytes that a plain step reads: the weights, and the keys and values of ``length`` tokens.

    Of untied embeddings a step reads only one row per token, which is not counted.
    """
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tie_embeddings:
        read -= params["embed"]["embedding"].nbytes
    return read + _cache_bytes(config, batch * length)


def bytes_needed(name: str, size: Scale) -> float:
    """The most bytes that a model takes: with its draft, the caches of all loops, and logits."""
    config, small = size.models[name], size.models["1b"]
    count = sum(
        math.prod(leaf.shape)
        for c in (config, small)
        for leaf in jax.tree.leaves(lm.abstract_params(c))
    )
    slots = size.prompt + size.new + max(size.sizes)
    cache = _cache_bytes(config, size.batches[-1] * slots)
    logits = size.batches[-1] * max(size.sizes) * config.vocab_size * 4
    return 2 * count + 2 * (len(size.sizes) + len(size.trees)) * cache + 4 * logits


def cells(name: str, size: Scale) -> list[tuple[float, int, int]]:
    """(bytes, batch, context) of plain decoding after long prompts, the smallest first.

    The bytes are needed in any case: the weights, the cache, and the scores of a chunk of the
    prompt in float32.
    """
    config = size.models[name]
    weights = 2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(lm.abstract_params(config)))
    result = []
    for context in size.contexts:
        for batch in size.context_batches:
            slots = context + size.new
            scores = 4 * batch * config.num_heads * min(CHUNK, context) * slots
            cache = _cache_bytes(config, batch * slots)
            result.append((weights + cache + scores, batch, context))
    return sorted(result)
