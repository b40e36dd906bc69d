"""Hydra: sequential heads, each of which also reads the tokens drafted before its depth.

Ankner et al. 2024 (2402.05109). The head of depth d, from 0, maps x = [s, e(pending), e(x_1), ...,
e(x_d)], where e is the target's own embedding, to R x + SiLU(W x + b); residual blocks and a
vocabulary map with a bias follow. s is the target's last feature; with ``prefix`` (Hydra++) it is
the output of one more decoder layer over all features up to this one.

Rules and lossless classes are those of ``medusa``. A sampled draft token has probabilities that
depend on its path, so siblings "iid" and "without_replacement" are accepted more often than with
``medusa``. The authors' code has a loss that reconstructs the target's feature and, for Hydra++, a
dropout of 0.2; both are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import whole, yes_or_no
from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads import _drafter, _family, _given, _prefix
from specjax.drafters.heads._given import Given
from specjax.errors import UserError
from specjax.models.logits import in_float32
from specjax.models.short_blocks import matmul
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM, Drafter, ModelParams, Params

REFERENCE = "ankner2024hydra"

SHARED = HeadKeys
# The authors' values.
HEADS, LAYERS, LAYERS_AFTER_PREFIX = 4, 1, 4


def make(
    target: LM, *, layers: int = 0, prefix: bool = False, head_dim: int = 0, **shared: Any
) -> Drafter:
    """Drafts with Hydra heads.

    Args:
        target: the model whose features the heads read.
        layers: blocks of each head; 0: as in the files, or for new heads 1 (Hydra++: 4).
        prefix: whether new heads have a decoder layer before them (Hydra++); in files the
            tensors decide, and True is an error where the layer is missing.
        head_dim: width of that layer's attention heads; 0: as in the files, or the largest that
            fits a new layer.
        shared: the keys of ``HeadKeys``; ``heads`` is 4 for new heads, and ``model`` may be
            released heads (hydra_lm_head.pt or .safetensors).

    Raises:
        UserError: files without heads or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    keys = HeadKeys(**shared)
    whole("layers", layers, 0)
    whole("head_dim", head_dim, 0)
    yes_or_no("prefix", prefix)
    given = _given.read("hydra", target, keys)
    offset = given.config.get("hidden_state_offset")
    if offset:
        raise UserError(
            f"hidden_state_offset is {offset!r}; only heads on the last feature can be read"
        )
    shape = _prefix_shape(given, prefix, head_dim)
    default = LAYERS if shape is None else LAYERS_AFTER_PREFIX
    heads, layers = _given.sizes(
        _stored_sizes(given.params), heads=(keys.heads, HEADS), layers=(layers, default)
    )
    family = _family.Heads(
        name="hydra",
        depth=heads,
        begin=Bound(_begin, heads),
        step=Bound(_step, given.ends.embed, layers),
        start=Bound(_start, target, heads, layers, shape),
        prefix=None if shape is None else _prefix.build(shape, _prefix_dtype(given.params)),
        facts=() if shape is None else _prefix.facts(shape),
    )
    return _drafter.build(target, family, keys, given)


def _stored_sizes(params: Params) -> tuple[int, int] | None:
    """(heads, layers)"""
    if params is None:
        return None
    return len(params["mlp"]), 1 + len(params["mlp"]["0"].get("blocks", ()))


def _prefix_shape(given: Given, prefix: bool, head_dim: int) -> TransformerConfig | None:
    """The shape of the prefix layer, or None. Raises UserError."""
    params = given.params
    if params is not None:
        if prefix and "prefix" not in params:
            raise UserError("prefix is set, and the given heads have no prefix layer; leave it out")
        prefix = "prefix" in params
    if not prefix:
        if head_dim:
            raise UserError(
                f"head_dim is {head_dim} and belongs to a prefix layer; leave it out, or set prefix"
            )
        return None
    if params is None:
        return _prefix.new(given.ends.width, head_dim)
    return _prefix.stored(params["prefix"], given.config, head_dim)


def _prefix_dtype(params: Params) -> Any:
    return jnp.float32 if params is None else params["prefix"]["norm"]["scale"].dtype


def _begin(heads: int, params: ModelParams, feature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state is the feature [...,E] and the tokens since, i32[...,heads]."""
    return feature, jnp.zeros((*feature.shape[:-1], heads), jnp.int32)


def _step(
    embed: Callable[[Params, jax.Array], jax.Array],
    layers: int,
    params: ModelParams,
    state: tuple[jax.Array, jax.Array],
    depth: int,
    tokens: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    feature, path = state
    path = path.at[..., depth].set(tokens)
    since = embed(params.target, path[..., : depth + 1])
    read = jnp.concatenate([feature, since.reshape(*since.shape[:-2], -1)], -1)
    head = params.draft["mlp"][str(depth)]
    hidden = _linear(head["skip"], read) + jax.nn.silu(_linear(head["in"], read))
    for layer in range(layers - 1):
        hidden = hidden + jax.nn.silu(_linear(head["blocks"][str(layer)], hidden))
    last = params.draft["head"][str(depth)]
    return in_float32(_linear(last, hidden)), (feature, path)


def _start(
    target: LM,
    heads: int,
    layers: int,
    prefix: TransformerConfig | None,
    target_params: Params,
    key: jax.Array,
) -> Params:
    kernel = _family.output_kernel(target, target_params)
    size, vocab = kernel.shape
    mlp = {}
    for head in range(heads):
        read = (head + 2) * size
        # W is zero, as in the authors' code. R copies s and ignores the embeddings: a head begins
        # as the target's own map of the feature and not as noise.
        skip = jnp.eye(read, size)
        mlp[str(head)] = {
            "in": _zeros(read, size),
            "skip": {"kernel": skip, "bias": jnp.zeros(size)},
        }
        if layers > 1:
            blocks = {str(layer): _zeros(size, size) for layer in range(layers - 1)}
            mlp[str(head)]["blocks"] = blocks
    # Not a stack: taking one head of it copies a matrix of the vocabulary's size, in every draft.
    # Each has its own buffer: training donates them.
    last = {str(i): {"kernel": jnp.copy(kernel), "bias": jnp.zeros(vocab)} for i in range(heads)}
    params = {"mlp": mlp, "head": last}
    return params if prefix is None else params | {"prefix": _prefix.start(prefix, key)}


def _linear(params: Params, x: jax.Array) -> jax.Array:
    return matmul(x, params["kernel"]) + params["bias"]


def _zeros(read: int, size: int) -> Params:
    return {"kernel": jnp.zeros((read, size)), "bias": jnp.zeros(size)}
