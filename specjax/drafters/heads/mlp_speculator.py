"""MLP speculator: a small recurrent network takes up the newest token and guesses the next, stage by stage. L1 as said below.

Wertheimer et al. 2024 (2404.19124) and its code (fms-extras), card 5. Stage i of n makes of the state s before it, and of the
token x that came last,

    s_i = GELU(LN_i(W_i s_(i-1) + (w_e / w_s) E_i[x])),  logits_i = H_i s_i,  w_s = 0.5^(0.5/n),  w_e = sqrt((1 - w_s^2) I / 2)

where s_0 is the target's last feature, I the inner width, GELU the exact one and LN divides by the root mean square, then
scales and shifts. The weights keep half of s_0's power through n stages, however few of them are run.

Rules and laws are those of ``hydra``.
"""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import whole, yes_or_no
from specjax.drafters.heads import _shared
from specjax.errors import UserError
from specjax.topology.shapes import Topology
from specjax.types import LM, Drafter, Params

HEADS = 3
EPS = 1e-6


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
    tie: bool = False,
    scale_input: bool = False,
    params: Params = None,
    dtype: Any = None,
) -> Drafter:
    """Drafts with an MLP speculator.

    Args:
        target: the model whose features it reads.
        model: a directory of one, trained here or released ("accelerator" repositories).
        tree, nodes, search, siblings: the shape of a draft, see ``_heads.build``; default: the chain of all stages.
        heads: n, how many stages; 0: as in the files, for a new one 3. A shallower ``tree`` runs fewer.
        inner: I; 0: as in the files, for a new one the target's width.
        tie: all stages share E, H and LN, and all but the first W; in files they do or they do not.
        scale_input: s_0 is divided by sqrt(2) times its root mean square; files say it themselves.
        params: its parameters, instead of ``model``.
        dtype: in which ``model`` is read; None: float32 on CPUs, bfloat16 elsewhere (to train on, read float32).

    Raises:
        UserError: files that are none or of another target, other numbers than in the files, a tree that does not fit.
    """
    whole("heads", heads, 0)
    whole("inner", inner, 0)
    yes_or_no("tie", tie)
    yes_or_no("scale_input", scale_input)
    width, *_ = _shared.ends("mlp_speculator", target)
    params, config = _shared.load("mlp_speculator", target, model, params, dtype)
    if params is not None:
        stages, _, stored = params["emb"].shape
        tied = stages == 1 and "proj" in params
        if tied and not (heads or config):
            raise UserError(
                "these stages are tied, and their shapes do not say how many there are; give heads"
            )
        stages = config.get("n_predict", heads) if tied else stages
        heads, inner = _shared.as_stored(heads=(heads, stages), inner=(inner, stored))
        for name, asked, have in (
            ("tie", tie, tied),
            ("scale_input", scale_input, config.get("scale_input", True)),
        ):
            if asked and not have:
                raise UserError(
                    f"{name} is asked for, and the heads in the files are without it; leave it out"
                )
        tie, scale_input = tied, config.get("scale_input", scale_input)
    heads, inner = heads or HEADS, inner or width
    if tie and heads < 2:
        raise UserError(
            "tie is asked for, and there is one stage, which shares with none; raise heads or leave it out"
        )
    keep = 0.5 ** (0.5 / heads)
    weight = math.sqrt((1 - keep**2) * inner / 2) / keep

    def begin(params, feature):
        return _normal(feature) / math.sqrt(2) if scale_input else feature

    def step(params, state, depth, tokens):
        own, at = params.draft, 0 if tie else depth
        into = own["proj_in"] if depth == 0 else own["proj"][0 if tie else depth - 1]
        state = state @ into + weight * own["emb"][at][tokens]
        state = _normal(state) * own["ln"]["scale"][at] + own["ln"]["bias"][at]
        state = jax.nn.gelu(state, approximate=False)
        return _shared.logits(state @ own["head"][at]), state

    def start(target_params, key):
        del target_params
        stages, after = (1, 1) if tie else (heads, heads - 1)
        shapes = {"emb": (stages, target.vocab_size, inner), "proj_in": (width, inner)}
        shapes |= {"head": (stages, inner, target.vocab_size)} | (
            {"proj": (after, inner, inner)} if after else {}
        )
        keys = jax.random.split(key, len(shapes))
        params = {
            name: jax.random.normal(k, shape) / math.sqrt(inner)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return params | {
            "ln": {"scale": jnp.ones((stages, inner)), "bias": jnp.zeros((stages, inner))}
        }

    facts = {"n_predict": heads, "scale_input": scale_input}
    family = _shared.Heads("mlp_speculator", heads, begin, step, start, facts=facts)
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


def _normal(x: jax.Array) -> jax.Array:
    """x divided by its root mean square, which is taken in float32 at least."""
    wide = _shared.logits(x)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)).astype(x.dtype)
