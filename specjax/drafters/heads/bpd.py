"""Blockwise parallel decoding: p_2, p_3, ... share the target's LM head, each behind a feed-forward layer of its own.

Stern et al. 2018 (1811.03115), card 1. Slot k >= 2 gives unembed(h + W2 relu(W1 h + b1) + b2), W2 zero when training begins.
Slot 1 is the target itself: it bypasses the layer (the authors' does not), so that p_1, which verifies, is as pretrained.

Rules and laws are those of ``medusa``. Train with ``config.loss.slots = "one"`` for the paper's own recipe, one random slot a
batch; with ``config.joint`` for its fine-tuned models. The paper's lossy rules are ``tolerance`` and its relatives.
"""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import whole
from specjax.drafters.heads import _shared
from specjax.topology.shapes import Topology
from specjax.types import LM, Drafter, Params

HEADS = 3
WIDER = 4  # the layer's inner width, in widths of the target: what its own feed-forward layers had


def make(
    target: LM,
    *,
    model: str | os.PathLike | None = None,
    tree: Topology | str = "",
    nodes: int = 0,
    search: str = "optimal",
    siblings: str = "top_k",
    heads: int = 0,
    inner: int = 0,
    params: Params = None,
    dtype: Any = None,
) -> Drafter:
    """Drafts with the extra slots of blockwise parallel decoding.

    Args:
        target: the model that the slots share features and LM head with.
        model: a directory of slots trained here.
        tree, nodes, search, siblings: the shape of a draft, see ``_heads.build``; default: the chain of all slots.
        heads: how many slots beyond the target's own (the paper's k - 1); 0: as in the files, for new ones 3.
        inner: width inside their layers; 0: as in the files, for new ones four times the target's.
        params: the slots' parameters, instead of ``model``.
        dtype: in which ``model`` is read; None: float32 on CPUs, bfloat16 elsewhere (to train on, read float32).

    Raises:
        UserError: files that are none or of another target, other numbers than in the files, a tree that does not fit.
    """
    whole("heads", heads, 0)
    whole("inner", inner, 0)
    width, _, unembed = _shared.ends("bpd", target)
    params, config = _shared.load("bpd", target, model, params, dtype)
    if params is not None:
        stored = params["up"]["bias"].shape
        heads, inner = _shared.as_stored(heads=(heads, stored[0]), inner=(inner, stored[1]))
    heads, inner = heads or HEADS, inner or WIDER * width

    def begin(params, feature):
        return feature

    def step(params, feature, depth, tokens):
        up, down = (jax.tree.map(lambda x: x[depth], params.draft[name]) for name in ("up", "down"))
        inside = jax.nn.relu(feature @ up["kernel"] + up["bias"])
        return unembed(params.target, feature + inside @ down["kernel"] + down["bias"]), feature

    def start(target_params, key):
        del target_params
        up = jax.random.normal(key, (heads, width, inner)) / math.sqrt(width)
        return {
            "up": {"kernel": up, "bias": jnp.zeros((heads, inner))},
            "down": {"kernel": jnp.zeros((heads, inner, width)), "bias": jnp.zeros((heads, width))},
        }

    family = _shared.Heads("bpd", heads, begin, step, start, independent=True)
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
