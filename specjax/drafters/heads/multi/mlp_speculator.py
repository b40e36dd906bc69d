"""MLP speculator: a small recurrent network reads the newest token and predicts the next one.

Wertheimer et al. 2024 (2404.19124) and its code (fms-extras). Stage i of n maps the state s_(i-1)
and the newest token x to

    s_i = GELU(LN_i(W_i s_(i-1) + (w_e / w_s) E_i[x])),  logits_i = H_i s_i,
    w_s = 0.5^(0.5/n),  w_e = sqrt((1 - w_s^2) I / 2)

where s_0 is the target's last feature, I the inner width and GELU the exact one; LN divides by the
root mean square, then scales and shifts. With these weights half of the power of s_0 is left after
n stages, also if fewer stages are run.

Rules and lossless classes are those of ``medusa``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import files
from specjax.drafters.files.codec import (
    Codec,
    Config,
    Found,
    Leaves,
    Rule,
    Rules,
    Shapes,
    Sizes,
    Tensors,
)
from specjax.drafters.heads.multi import _heads
from specjax.drafters.shared_keys import HeadKeys, stored_size
from specjax.errors import UserError
from specjax.models.config_values import switch
from specjax.models.layers import in_float32, matmul
from specjax.types import LM, Array, Drafter, ModelParams, Params

REFERENCE = "wertheimer2024accelerating"

# Name of a target -> a head for it on the Hub.
RELEASED = {
    "Llama-2-13b-chat-hf": "ibm-ai-platform/llama-13b-accelerator",
    "Meta-Llama-3-8B-Instruct": "ibm-ai-platform/llama3-8b-accelerator",
}

HEADS = 3
EPS = 1e-6


def _tied(params: Params) -> bool:
    return len(params["emb"]) == 1 and "proj" in params


class Keys(HeadKeys):
    """The keys of ``mlp_speculator``."""

    heads: int = stored_size(
        "the number n of stages, the most tokens of a draft",
        lambda params: None if _tied(params) else len(params["emb"]),
        new=HEADS,
        fact="n_predict",
    )
    inner: int = stored_size(
        "I; 0: as in the files, or the target's width for a new one",
        lambda params: params["emb"].shape[2],
    )
    tie: bool = key(
        False,
        "whether the stages of a new one share E, H and LN, and all but the first share W; read "
        "from the tensors of a stored one",
        size=_tied,
    )
    scale_input: bool = key(
        False,
        "whether s_0 is divided by sqrt(2) times its root mean square; read from config.json if "
        "it has this key",
        fact="scale_input",
        missing=True,
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with an MLP speculator.

    Raises:
        UserError: files without heads or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    given, keys = files.read("mlp_speculator", target, keys)
    if given.params is not None and not keys.heads:
        raise UserError(
            "these stages are tied, so their shapes do not show how many there are; give heads"
        )
    tie, scale_input = keys.tie, keys.scale_input
    width = given.ends.width
    heads, inner = keys.heads, keys.inner or width
    if tie and heads < 2:
        raise UserError(
            f"tie needs at least 2 stages, and heads is {heads}; raise heads or leave tie out"
        )
    keep = 0.5 ** (0.5 / heads)
    weight = math.sqrt((1 - keep**2) * inner / 2) / keep
    family = _heads.Heads(
        name="mlp_speculator",
        depth=heads,
        begin=Bound(_begin, scale_input),
        step=Bound(_step, tie, weight),
        start=Bound(_start, (width, inner, target.vocab_size), heads, tie),
        facts=(("n_predict", heads), ("scale_input", scale_input)),
    )
    return _heads.build(target, family, keys, given)


def _begin(scale_input: bool, params: ModelParams, feature: Array) -> Array:
    return _normal(feature) / math.sqrt(2) if scale_input else feature


def _step(
    tie: bool, weight: float, params: ModelParams, state: Array, depth: int, tokens: Array
) -> tuple[Array, Array]:
    """``weight`` is w_e / w_s."""
    own, at = params.draft, 0 if tie else depth
    into = own["proj_in"] if depth == 0 else own["proj"][str(0 if tie else depth - 1)]
    state = matmul(state, into) + weight * own["emb"][at, tokens]
    state = _normal(state) * own["ln"]["scale"][at] + own["ln"]["bias"][at]
    state = jax.nn.gelu(state, approximate=False)
    return in_float32(matmul(state, own["head"][str(at)])), state


def _start(
    sizes: tuple[int, int, int], heads: int, tie: bool, target_params: Params, key: Array
) -> Params:
    """``sizes`` are the target's width, the inner width and the vocabulary's size."""
    width, inner, vocab = sizes
    stages, after = (1, 1) if tie else (heads, heads - 1)
    shapes = {"emb": (stages, vocab, inner), "proj_in": (width, inner)}
    shapes |= {"head": (stages, inner, vocab)} | ({"proj": (after, inner, inner)} if after else {})
    params: Params = {
        name: jax.random.normal(k, shape) / math.sqrt(inner)
        for k, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
    }
    # Taking one matrix of a stack copies it, in every draft.
    params |= {name: _apart(params[name]) for name in ("head", "proj") if name in params}
    return params | {"ln": {"scale": jnp.ones((stages, inner)), "bias": jnp.zeros((stages, inner))}}


def _apart(stack: Array) -> dict[str, Array]:
    return {str(index): matrix for index, matrix in enumerate(stack)}


def _normal(x: Array) -> Array:
    """x divided by its root mean square, which is computed in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)).astype(x.dtype)


def _stage(i: str) -> Rules:
    return (
        Rule(f"speculator.emb.{i}.weight", f"emb[{i}]", "V I"),
        Rule(f"speculator.head.{i}.weight", f"head.{i}", "I V", True),
        Rule(f"speculator.ln.{i}.weight", f"ln.scale[{i}]", "I"),
        Rule(f"speculator.ln.{i}.bias", f"ln.bias[{i}]", "I"),
    )


def _projection(i: str, before: str) -> Rule:
    return Rule(f"speculator.proj.{i}.weight", f"proj.{before}", "I I", True)


_FIRST = (*_stage("0"), Rule("speculator.proj.0.weight", "proj_in", "D I", True))


class _Files(Codec):
    tables: ClassVar = {
        "": (*_FIRST, *_stage("{i+1}"), _projection("{i+1}", "{i}")),
        "tied": (*_FIRST, _projection("1", "0")),
    }
    architectures = ("MLPSpeculatorPreTrainedModel",)
    repeated = ("emb", "head", "ln", "proj")

    def select(self, where: Path, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
        front = "" if any(name.startswith("speculator.") for name in tensors) else "speculator."
        return {front + name: read for name, read in tensors.items()}

    def table(self, layout: str, shapes: Shapes, config: Mapping[str, Any]) -> Rules:
        one = shapes.get(("emb",), ())[:1] == (1,)
        return self.tables["tied" if one and ("proj", "0") in shapes else ""]

    def reduce(self, found: Found) -> Found:
        if not (switch(found.where, found.config, "tie_weights") and found.tied):
            return found
        stages = sum(place.path == ("emb",) for place in found.layout.values())
        names = {rule.name for rule in self.tables["tied"]}
        once = {name: place for name, place in found.layout.items() if name in names}
        return found._replace(config=found.config | {"n_predict": stages}, layout=once)

    def facts(self, found: Found, leaves: Leaves, sizes: Sizes) -> Config:
        stages = len(leaves["emb",])
        shared = stages == 1 and ("proj", "0") in leaves
        if shared:
            stages = found.config.get("n_predict")
            if type(stages) is not int or stages < 2:
                raise UserError(
                    f"{found.where}: n_predict is {stages!r}; config.json must give the number of "
                    "tied stages"
                )
        counts = found.config.get("top_k_tokens_per_head")
        fits = isinstance(counts, list) and len(counts) == stages
        return super().facts(found, leaves, sizes) | {
            # Other programs require a number for each stage.
            "top_k_tokens_per_head": counts if fits else [1] * stages,
            "emb_dim": sizes["D"],
            "inner_dim": sizes["I"],
            "n_predict": stages,
            "tie_weights": shared,
            "scale_input": bool(switch(found.where, found.config, "scale_input")),
        }


CODEC = _Files("mlp_speculator")
