"""Hydra: heads in a row, each of which also reads the tokens drafted before it. L1 with the rules below.

Ankner et al. 2024 (2402.05109), card 4. The head of depth d, from 0, makes of x = [s, e(pending), e(x_1), ..., e(x_d)], e being
the target's own embedding, R x + SiLU(W x + b); residual blocks and a vocabulary map with a bias follow. s is the target's last
feature; with ``prefix`` (Hydra++) it is what one more decoder layer makes of all features so far.

Rules and laws are those of ``medusa``. Sampled drafts have a law that depends on the path, so siblings of "iid" and
"without_replacement" are worth more here than there. The dropout of the authors' training (0.2, Hydra++) is left out.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import whole, yes_or_no
from specjax.drafters.heads import _prefix, _shared
from specjax.errors import UserError
from specjax.topology.shapes import Topology
from specjax.types import LM, Drafter, Params

HEADS, LAYERS, LAYERS_AFTER_PREFIX = 4, 1, 4  # as the authors have them


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
    prefix: bool = False,
    head_dim: int = 0,
    params: Params = None,
    dtype: Any = None,
) -> Drafter:
    """Drafts with Hydra heads.

    Args:
        target: the model that the heads read.
        model: a directory of heads, trained here or released (hydra_lm_head.pt or .safetensors).
        tree, nodes, search, siblings: the shape of a draft, see ``_heads.build``; default: the chain of all heads.
        heads, layers: how many heads, of how many blocks each; 0: as in the files, for new ones 4 and 1 (Hydra++: 4 and 4).
        prefix: Hydra++, one decoder layer before the heads; in files there is one or there is none.
        head_dim: width of that layer's attention heads; 0: as in the files, for a new one the largest that fits.
        params: the heads' parameters, instead of ``model``.
        dtype: in which ``model`` is read; None: float32 on CPUs, bfloat16 elsewhere (to train on, read float32).

    Raises:
        UserError: files that are none or of another target, other numbers than in the files, a tree that does not fit.
    """
    whole("heads", heads, 0)
    whole("layers", layers, 0)
    whole("head_dim", head_dim, 0)
    yes_or_no("prefix", prefix)
    width, embed, _ = _shared.ends("hydra", target)
    params, config = _shared.load("hydra", target, model, params, dtype)
    if config.get("hidden_state_offset"):
        raise UserError(
            f"hidden_state_offset is {config['hidden_state_offset']!r}; only heads on the last feature are read"
        )
    if params is not None:
        blocks = params["mlp"]["0"].get("blocks")
        depth = 1 if blocks is None else 1 + blocks["bias"].shape[0]
        heads, layers = _shared.as_stored(heads=(heads, len(params["mlp"])), layers=(layers, depth))
        if prefix and "prefix" not in params:
            raise UserError(
                "prefix is asked for, and the heads in the files have no prefix layer; leave it out"
            )
        prefix = "prefix" in params
    if head_dim and not prefix:
        raise UserError(
            f"head_dim is {head_dim} and belongs to a prefix layer; leave it out, or ask for prefix"
        )
    heads, layers = heads or HEADS, layers or (LAYERS_AFTER_PREFIX if prefix else LAYERS)
    shape = layer = None
    if prefix:
        old = None if params is None else params["prefix"]
        shape = (
            _prefix.new(width, head_dim) if old is None else _prefix.stored(old, config, head_dim)
        )
        layer = _prefix.build(shape, jnp.float32 if old is None else old["norm"]["scale"].dtype)

    def begin(params, feature):
        return (feature,)

    def step(params, path, depth, tokens):
        path = (*path, embed(params.target, tokens))
        head, read = params.draft["mlp"][str(depth)], jnp.concatenate(path, -1)
        hidden = _linear(head["skip"], read) + jax.nn.silu(_linear(head["in"], read))
        for layer in range(layers - 1):
            hidden = hidden + jax.nn.silu(
                _linear(jax.tree.map(lambda x, i=layer: x[i], head["blocks"]), hidden)
            )
        last = jax.tree.map(lambda x: x[depth], params.draft["head"])
        return _shared.logits(_linear(last, hidden)), path

    def start(target_params, key):
        kernel = _shared.output_kernel(target, target_params)
        size, vocab = kernel.shape
        mlp = {}
        for head in range(heads):
            read = (head + 2) * size
            # W is zero, as the authors have it. R copies s and takes no notice of the embeddings, so that a head begins as the
            # target's own map of the feature and not as noise.
            skip = jnp.eye(read, size)
            mlp[str(head)] = {
                "in": _zeros(read, size),
                "skip": {"kernel": skip, "bias": jnp.zeros(size)},
            }
            if layers > 1:
                mlp[str(head)]["blocks"] = _zeros(layers - 1, size, size)
        params = {
            "mlp": mlp,
            "head": {
                "kernel": jnp.tile(kernel[None], (heads, 1, 1)),
                "bias": jnp.zeros((heads, vocab)),
            },
        }
        return params | ({"prefix": _prefix.start(shape, key)} if shape else {})

    facts = _prefix.facts(shape) if shape else {}
    family = _shared.Heads("hydra", heads, begin, step, start, prefix=layer, facts=facts)
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


def _linear(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["kernel"] + params["bias"]


def _zeros(*shape: int) -> Params:
    return {"kernel": jnp.zeros(shape), "bias": jnp.zeros((*shape[:-2], shape[-1]))}
