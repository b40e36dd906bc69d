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

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import whole
from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads import _drafter, _family, _given
from specjax.models.logits import in_float32
from specjax.models.short_blocks import matmul
from specjax.types import LM, Drafter, Params

REFERENCE = "cai2024medusa"

SHARED = HeadKeys
HEADS, LAYERS = 4, 1


def make(target: LM, *, layers: int = 0, **shared: Any) -> Drafter:
    """Drafts with Medusa heads.

    Args:
        target: the model whose features the heads read.
        layers: residual blocks of each head; 0: as in the files, or 1 for new heads.
        shared: the keys of ``HeadKeys``; ``heads`` is 4 for new heads, and ``model`` may be
            released heads (medusa_lm_head.pt or .safetensors, merged models).

    Raises:
        UserError: files without heads or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    keys = HeadKeys(**shared)
    whole("layers", layers, 0)
    given = _given.read("medusa", target, keys)
    stored = None if given.params is None else given.params["block"]["bias"].shape[:2]
    heads, layers = _given.sizes(stored, heads=(keys.heads, HEADS), layers=(layers, LAYERS))
    head = Bound(_head, given.ends.unembed)
    family = _family.Heads(
        name="medusa",
        depth=heads,
        begin=_family.begin_with_feature,
        step=Bound(_family.step_of, head),
        start=Bound(_start, target, heads, layers),
        every=Bound(_family.at_all_depths, head),
    )
    return _drafter.build(target, family, keys, given)


def _head(
    unembed: Callable[[Params, jax.Array], jax.Array],
    own: Params,
    target_params: Params,
    hidden: jax.Array,
) -> jax.Array:
    block = own["block"]
    for layer in range(block["bias"].shape[0]):
        hidden = hidden + jax.nn.silu(matmul(hidden, block["kernel"][layer]) + block["bias"][layer])
    # Some released files have the residual blocks only and share the target's LM head.
    if "head" not in own:
        return unembed(target_params, hidden)
    return in_float32(matmul(hidden, own["head"]["kernel"]))


def _start(target: LM, heads: int, layers: int, target_params: Params, key: jax.Array) -> Params:
    del key
    kernel = _family.output_kernel(target, target_params)
    width = kernel.shape[0]
    block = {
        "kernel": jnp.zeros((heads, layers, width, width)),
        "bias": jnp.zeros((heads, layers, width)),
    }
    return {"block": block, "head": {"kernel": jnp.tile(kernel[None], (heads, 1, 1))}}
