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

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import files
from specjax.drafters.files import Ends, Given, decoder_layers
from specjax.drafters.files.codec import (
    Codec,
    Config,
    Found,
    Leaves,
    Rules,
    Shapes,
    Sizes,
    Tensors,
    linear,
    scale,
)
from specjax.drafters.heads import _prefix
from specjax.drafters.heads.multi import _heads
from specjax.drafters.heads.multi._heads import OfTarget
from specjax.drafters.shared_keys import HeadKeys, stored_size
from specjax.errors import UserError
from specjax.models.layers import affine, dtype_of, in_float32
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM, Array, Drafter, ModelParams, Params

REFERENCE = "ankner2024hydra"

# Name of a target -> a head for it on the Hub.
RELEASED = {"vicuna-7b-v1.3": "ankner/hydra-vicuna-7b-v1.3"}

# The authors' values.
HEADS, LAYERS, LAYERS_AFTER_PREFIX = 4, 1, 4


class Keys(HeadKeys):
    """The keys of ``hydra``."""

    heads: int = stored_size(
        "how many, the most tokens of a draft", lambda params: len(params["mlp"]), new=HEADS
    )
    layers: int = stored_size(
        "blocks of each head; 0: as in the files, or for new heads 1 (Hydra++: 4)",
        lambda params: 1 + len(params["mlp"]["0"].get("blocks", ())),
    )
    prefix: bool = key(
        False,
        "whether new heads have a decoder layer before them (Hydra++); in files the tensors "
        "decide, and True is an error where the layer is missing",
        part="prefix",
    )
    head_dim: int = key(
        0,
        "width of that layer's attention heads; 0: as in the files, or the target's if new",
        least=0,
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with Hydra heads.

    Raises:
        UserError: files without heads or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    given, keys = files.read("hydra", target, keys)
    offset = given.config.get("hidden_state_offset")
    if offset:
        raise UserError(
            f"hidden_state_offset is {offset!r}; only heads on the last feature can be read"
        )
    shape = _prefix_shape(target, given, keys)
    heads, layers = keys.heads, keys.layers or (LAYERS if shape is None else LAYERS_AFTER_PREFIX)
    dtype = dtype_of(given.params and given.params.get("prefix"))
    family = _heads.Heads(
        name="hydra",
        depth=heads,
        begin=Bound(_begin, heads),
        step=Bound(_step, given.ends.embed, layers),
        start=Bound(_start, given.ends, heads, layers, shape),
        prefix=None if shape is None else _prefix.build(shape, dtype),
        facts=() if shape is None else _prefix.facts(shape),
    )
    return _heads.build(target, family, keys, given)


def _prefix_shape(target: LM, given: Given, keys: Keys) -> TransformerConfig | None:
    """The shape of the prefix layer, or None. Raises UserError."""
    if not keys.prefix:
        keys.refuse(("head_dim",), "without a prefix layer", "leave it out, or set prefix")
        return None
    if given.params is None:
        return _prefix.new(given.ends.width, target, keys.head_dim)
    return _prefix.stored(given.params["prefix"], given.config, keys.head_dim)


# The feature [...,E] and the tokens since, i32[...,heads].
State = tuple[Array, Array]


def _begin(heads: int, params: ModelParams, feature: Array) -> State:
    """``Heads.begin``."""
    return feature, jnp.zeros((*feature.shape[:-1], heads), jnp.int32)


def _step(
    embed: OfTarget, layers: int, params: ModelParams, state: State, depth: int, tokens: Array
) -> tuple[Array, State]:
    feature, path = state
    path = path.at[..., depth].set(tokens)
    since = embed(params.target, path[..., : depth + 1])
    read = jnp.concatenate([feature, since.reshape(*since.shape[:-2], -1)], -1)
    head = params.draft["mlp"][str(depth)]
    hidden = affine(head["skip"], read) + jax.nn.silu(affine(head["in"], read))
    for layer in range(layers - 1):
        hidden = hidden + jax.nn.silu(affine(head["blocks"][str(layer)], hidden))
    return in_float32(affine(params.draft["head"][str(depth)], hidden)), (feature, path)


def _start(
    ends: Ends,
    heads: int,
    layers: int,
    prefix: TransformerConfig | None,
    target_params: Params,
    key: Array,
) -> Params:
    kernel = ends.output_kernel(target_params)
    size, vocab = kernel.shape
    mlp = {}
    for head in range(heads):
        read = (head + 2) * size
        # W is zero, as in the authors' code. R copies s and ignores the embeddings: a head begins
        # as the target's own map of the feature and not as noise.
        skip = {"kernel": jnp.eye(read, size), "bias": jnp.zeros(size)}
        mlp[str(head)] = {"in": _heads.zeros(read, size), "skip": skip}
        if layers > 1:
            blocks = {str(layer): _heads.zeros(size, size) for layer in range(layers - 1)}
            mlp[str(head)]["blocks"] = blocks
    # Not a stack: taking one head of it copies a matrix of the vocabulary's size, in every draft.
    # Each has its own buffer: training donates them.
    last = {str(i): {"kernel": jnp.copy(kernel), "bias": jnp.zeros(vocab)} for i in range(heads)}
    params = {"mlp": mlp, "head": last}
    return params if prefix is None else params | {"prefix": _prefix.start(prefix, key)}


_PREFIX = "prefix_embeding_layer."  # (sic)


def _prefix_rules() -> Rules:
    """The decoder layer before the heads; one whose norms have biases is GPT-2's, with no gate."""
    names = {x: y for x, y in decoder_layers.NAMES.items() if x[-6:] not in ("q_norm", "k_norm")}
    bias_of = {"attention": "attention_bias", "mlp": "mlp_bias"}
    return (
        *decoder_layers.decoder_layer(
            *(f"{_PREFIX}layers.0.", "prefix.", names),
            parts=dict.fromkeys(names, "prefix") | {"mlp.gate": "prefix !norm_bias"},
            biases={module: bias_of.get(module.split(".")[0], "norm_bias") for module in names},
        ),
        *linear(f"{_PREFIX}layers.0.mlp.gate_proj", "prefix.mlp.gate", "D F", "mlp_bias", "gate"),
        *scale(f"{_PREFIX}norm", "prefix.norm", "D", "norm_bias", "prefix"),
    )


def _rules(first: str, others: str, last: str) -> Rules:
    """The heads; dropout layers between the blocks make the numbers of the others odd."""
    return (
        *linear(f"hydra_mlp.{{i}}.{first}.linear", "mlp.{i}.in", "{i+2}D D", ""),
        *linear(f"hydra_mlp.{{i}}.{first}.res_connection", "mlp.{i}.skip", "{i+2}D D", ""),
        *linear(f"hydra_mlp.{{i}}.{others}.linear", "mlp.{i}.blocks.{j}", "D D", ""),
        *linear(f"hydra_lm_head.{{i}}{last}", "head.{i}", "D V", ""),
        *_prefix_rules(),
    )


class _Files(Codec):
    files = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
    tables: ClassVar = {"": _rules("0", "{j+1}", ""), "dropout": _rules("1", "{2j+3}", ".1")}
    repeated = ("blocks",)

    def select(self, where: Path, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
        names = [name for name in tensors if name.startswith("hydra_mlp.")]
        if names and not any(".res_connection." in name for name in names):
            raise UserError(
                f"{where} has Hydra heads that read no tokens (not grounded); give grounded ones"
            )
        # The prefix is a whole Llama model of one layer; its embedding is not used.
        unused = re.compile(re.escape(_PREFIX) + r"(embed_tokens\.weight|.*rotary_emb\.inv_freq)$")
        return {name: read for name, read in tensors.items() if not unused.match(name)}

    def table(self, layout: str, shapes: Shapes, config: Mapping[str, Any]) -> Rules:
        return self.tables["dropout" if any(path[0] == "prefix" for path in shapes) else ""]

    def facts(self, found: Found, leaves: Leaves, sizes: Sizes) -> Config:
        return super().facts(found, leaves, sizes) | {
            "hydra_num_heads": len({path[1] for path in leaves if path[0] == "head"}),
            "hydra_num_layers": 1 + len({x[3] for x in leaves if x[:3] == ("mlp", "0", "blocks")}),
            "grounded_heads": True,
            "tied": found.tied,
            "hydra_head_arch": "prefix-mlp" if ("prefix", "norm", "scale") in leaves else "mlp",
        }


CODEC = _Files("hydra")
