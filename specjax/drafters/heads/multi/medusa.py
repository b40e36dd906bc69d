"""Medusa: heads on the target's last feature predict the tokens at distance 2, 3, ... at once.

Cai et al. 2024 (2401.10774). Head k gives W2 (h + SiLU(W1 h + b)), with W1 zero and W2 the target's
own LM head when training begins. A head does not read the tokens drafted before its depth, so one
feature gives the whole tree.

With siblings "top_k" (a deterministic tree) and the rule "deterministic" or "match" it is L1 at
every temperature. With "typical", the paper's rule, it is L3 above temperature 0. Drafts sampled
from the heads' probabilities are L1 with "recursive" and its variants. A target trained together
with its heads (Medusa-2, ``config.joint``) is another model: lossless then refers to that model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax import declare
from specjax.bound import Bound
from specjax.drafters import files
from specjax.drafters.files import Ends
from specjax.drafters.files.codec import Codec, Config, Found, Leaves, Sizes, Tensors, linear
from specjax.drafters.heads.multi import _heads
from specjax.drafters.heads.multi._heads import OfTarget
from specjax.drafters.shared_keys import HeadKeys, stored_size
from specjax.errors import UserError
from specjax.models.config_values import switch
from specjax.models.layers import in_float32, matmul
from specjax.types import LM, Array, Drafter, Params

REFERENCE = "cai2024medusa"

# Name of a target -> a head for it on the Hub.
RELEASED = {
    "vicuna-7b-v1.3": "FasterDecoding/medusa-vicuna-7b-v1.3",
    "vicuna-13b-v1.3": "FasterDecoding/medusa-vicuna-13b-v1.3",
    "vicuna-33b-v1.3": "FasterDecoding/medusa-vicuna-33b-v1.3",
}

HEADS, LAYERS = 4, 1


class Keys(HeadKeys):
    """The keys of ``medusa``."""

    heads: int = stored_size(
        "how many, the most tokens of a draft",
        lambda params: len(params["block"]["bias"]),
        new=HEADS,
    )
    layers: int = stored_size(
        "residual blocks of each head", lambda params: params["block"]["bias"].shape[1], new=LAYERS
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with Medusa heads.

    Raises:
        UserError: files without heads or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    given, keys = files.read("medusa", target, keys)
    head = Bound(_head, given.ends.unembed)
    family = _heads.Heads(
        name="medusa",
        depth=keys.heads,
        step=Bound(_heads.step_of, head),
        start=Bound(_start, given.ends, keys.heads, keys.layers),
        every=Bound(_heads.at_all_depths, head),
    )
    return _heads.build(target, family, keys, given)


def _head(unembed: OfTarget, own: Params, target_params: Params, hidden: Array) -> Array:
    block = own["block"]
    for layer in range(block["bias"].shape[0]):
        hidden = hidden + jax.nn.silu(matmul(hidden, block["kernel"][layer]) + block["bias"][layer])
    # Some released files have the residual blocks only and share the target's LM head.
    if "head" not in own:
        return unembed(target_params, hidden)
    return in_float32(matmul(hidden, own["head"]["kernel"]))


def _start(ends: Ends, heads: int, layers: int, target_params: Params, *_: Any) -> Params:
    kernel = ends.output_kernel(target_params)
    width = kernel.shape[0]
    block = {
        "kernel": jnp.zeros((heads, layers, width, width)),
        "bias": jnp.zeros((heads, layers, width)),
    }
    return {"block": block, "head": {"kernel": jnp.tile(kernel[None], (heads, 1, 1))}}


class _Files(Codec):
    files = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")
    tables: ClassVar = {
        "medusa": (
            *linear("{i}.{j}.linear", "block[{i},{j}]", "D D", ""),
            *linear("{i}.{J}", "head[{i}]", "D V", parts="head"),
        ),
        "vllm": (
            *linear("blocks.{i}.layers.{j}", "block[{i},{j}]", "D D", "biases"),
            *linear("lm_heads.{i}", "head[{i}]", "D V", parts="head"),
        ),
    }
    repeated = ("block",)
    engines: ClassVar = {"vllm": ""}

    def obstacles(self, engine: str, leaves: Leaves, config: Config) -> dict[str, Any]:
        return {"it reads heads with LM heads of their own": ("head", "kernel") not in leaves}

    def select(self, where: Path, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
        merged = any(name.startswith("medusa_head.") for name in tensors)
        backbone = ("model.", "lm_head.") if merged else ()
        tensors = {
            re.sub(r"^medusa_heads?\.", "", name): read
            for name, read in tensors.items()
            if not name.startswith(backbone)
        }
        if switch(where, config, "original_lm_head"):
            tensors = {k: read for k, read in tensors.items() if not re.match(r"lm_heads?\.", k)}
        if "token_map" in tensors and "lm_heads.0.weight" in tensors:
            mapped = tensors.pop("token_map")().shape[0]
            # Heads for all tokens may come with a map: then it only names the rows that vLLM keeps.
            if tensors["lm_heads.0.weight"]().shape[0] <= mapped:
                raise UserError(
                    f"{where} has heads for the {mapped} tokens of its token_map; "
                    "give heads for all tokens"
                )
        return tensors

    def decode(self, found: Found, leaves: Leaves, sizes: Sizes) -> tuple[Leaves, Config]:
        kernel = leaves["block", "kernel"]
        # vLLM's heads may have no biases.
        leaves.setdefault(("block", "bias"), np.zeros(kernel.shape[:-1], kernel.dtype))
        return super().decode(found, leaves, sizes)

    def facts(self, found: Found, leaves: Leaves, sizes: Sizes) -> Config:
        heads, layers = leaves["block", "kernel"].shape[:2]
        own = {"medusa_num_heads": heads, "medusa_num_layers": layers, "tied": found.tied}
        # vLLM reads the biases of the blocks where this key is true.
        return super().facts(found, leaves, sizes) | own | {"medusa_fc_bias": True}


CODEC = _Files("medusa")
