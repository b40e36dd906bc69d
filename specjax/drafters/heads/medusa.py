"""Medusa: extra heads on the target's last feature guess the tokens at distance 2, 3, ... all at once. L1 with the rules below.

Cai et al. 2024 (2401.10774), card 3. Head k gives W2 (h + SiLU(W1 h + b)) with W1 zero and W2 the target's own LM head when
training begins. The head of depth d knows nothing of the tokens drafted before it, so one feature gives the whole tree.

With siblings "top_k" (a deterministic tree) and the rules "deterministic" or "match" it is lossless, greedy and sampled; with
"typical", the paper's rule, it is L3 above temperature 0. Sampled from the heads' laws it takes "recursive" and its relatives.
A target trained beside its heads (Medusa-2, ``config.joint``) is another target: lossless then means with respect to that one.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import whole
from specjax.drafters.heads import _shared
from specjax.topology.shapes import Topology
from specjax.types import LM, Drafter, Params

HEADS, LAYERS = 4, 1


def make(
    target: LM,
    *,
    model: str | os.PathLike | None = None,
    tree: Topology | str = "",
    nodes: int = 0,
    search: str = "optimal",
    siblings: str = "top_k",
    heads: int = 0,
    layers: int = 0,
    params: Params = None,
    dtype: Any = None,
) -> Drafter:
    """Drafts with Medusa heads.

    Args:
        target: the model that the heads read.
        model: a directory of heads, trained here or released (medusa_lm_head.pt or .safetensors, merged models).
        tree, nodes, search, siblings: the shape of a draft, see ``_heads.build``; default: the chain of all heads.
        heads, layers: how many heads, of how many residual blocks each; 0: as in the files, for new ones 4 and 1.
        params: the heads' parameters, instead of ``model``.
        dtype: in which ``model`` is read; None: float32 on CPUs, bfloat16 elsewhere (to train on, read float32).

    Raises:
        UserError: files that are none or of another target, other numbers than in the files, a tree that does not fit.
    """
    whole("heads", heads, 0)
    whole("layers", layers, 0)
    _, _, unembed = _shared.ends("medusa", target)
    params, config = _shared.load("medusa", target, model, params, dtype)
    if params is not None:
        stored = params["block"]["bias"].shape
        heads, layers = _shared.as_stored(heads=(heads, stored[0]), layers=(layers, stored[1]))
    heads, layers = heads or HEADS, layers or LAYERS

    def begin(params, feature):
        return feature

    def step(params, feature, depth, tokens):
        block, hidden = jax.tree.map(lambda x: x[depth], params.draft["block"]), feature
        for layer in range(layers):
            hidden = hidden + jax.nn.silu(hidden @ block["kernel"][layer] + block["bias"][layer])
        if (
            "head" not in params.draft
        ):  # old files keep the residual blocks only, for they share the target's LM head
            return unembed(params.target, hidden), feature
        return _shared.logits(hidden @ params.draft["head"]["kernel"][depth]), feature

    def start(target_params, key):
        del key
        kernel = _shared.output_kernel(target, target_params)
        width = kernel.shape[0]
        block = {
            "kernel": jnp.zeros((heads, layers, width, width)),
            "bias": jnp.zeros((heads, layers, width)),
        }
        return {"block": block, "head": {"kernel": jnp.tile(kernel[None], (heads, 1, 1))}}

    family = _shared.Heads("medusa", heads, begin, step, start, independent=True)
    accuracy = config.get("accuracy")
    return _shared.build(
        target,
        family,
        tree=tree,
        nodes=nodes,
        search=search,
        siblings=siblings,
        params=params,
        accuracy=accuracy,
    )
