"""Recurrent Drafter: one small recurrent network drafts by beam search.

ReDrafter (Cheng et al. 2024, 2403.09919). The state s_0 is zero; step i reads the newest token y,
which is the pending one at step 1, with the target's own embedding e:

    s_i = SiLU(W e(y) + U s_(i-1) + b)   (or, without a recurrent network, s_i = s_(i-1) + e(y)),
    z = P [f, s_i] + p,   z <- z + SiLU(A_l z + a_l) for each block l,   logits_i = H z,

where f is the target's last feature. P maps to the blocks' width F; where F is twice the target's
width there is none (z = [f, s_i]). All steps have the same parameters, so a draft may be deeper
than the ``heads`` steps that are trained (5).

The default draft is the paper's: a beam search of width ``top_k`` (6) and length ``depth`` (as
many as ``heads``), whose paths become a tree with each common prefix once (tree="beam"). It is
deterministic, so with the rule "deterministic" or "match" it is L1 at every temperature. The
authors verify each path with draws of its own and keep the longest, which is biased: which path is
longest depends on these draws. Chains, fixed trees and dynamic trees have the rules and lossless
classes of ``medusa``. The paper's distillation is ``config.loss.teacher``.
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
from specjax.checks import whole
from specjax.declare import key
from specjax.drafters import files
from specjax.drafters.files import Ends
from specjax.drafters.files.codec import Codec, Config, Found, Leaves, Sizes, Tensors, linear
from specjax.drafters.files.decoder_layers import plain_names
from specjax.drafters.growth.plans import BEAM
from specjax.drafters.heads.multi import _heads
from specjax.drafters.heads.multi._heads import OfTarget
from specjax.drafters.shared_keys import HeadKeys, stored_size
from specjax.models.config_values import check_part, switch
from specjax.models.layers import affine, in_float32, matmul
from specjax.types import LM, Array, Drafter, ModelParams, Params

REFERENCE = "cheng2024recurrent"

# The authors' values.
STEPS, LAYERS = 5, 2


class Keys(HeadKeys):
    """The keys of ``redrafter``."""

    layers: int = stored_size("number of blocks", lambda params: len(params["block"]), new=LAYERS)
    inner: int = stored_size(
        "F, width of the blocks; 0: as in the files, or twice the target's width",
        lambda params: params["block"]["0"]["bias"].shape[0],
    )
    running_sum: bool = key(
        False,
        "whether the state of a new network is the sum of the embeddings; in files the tensors "
        "decide, and True is an error where they have a recurrent network",
        size=lambda params: "rnn" not in params,
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with a recurrent network.

    Raises:
        UserError: files of another method or target, sizes that differ from the files, a tree that
            does not fit.
    """
    given, keys = files.read("redrafter", target, keys)
    layers, inner = keys.layers, keys.inner or 2 * given.ends.width
    steps = keys.heads or whole("n_predict", given.config.get("n_predict", STEPS), 1)
    family = _heads.Heads(
        name="redrafter",
        depth=steps,
        begin=_begin,
        step=Bound(_step, given.ends.embed),
        start=Bound(_start, given.ends, layers, inner, keys.running_sum),
        looped=True,
        tree=BEAM,
        facts=(("n_predict", steps),),
    )
    return _heads.build(target, family, keys, given)


def _begin(params: ModelParams, feature: Array) -> tuple[Array, Array]:
    """The state is the feature [...,D] and s [...,D]."""
    dtype = jnp.result_type(feature, params.draft["head"]["kernel"])
    return feature, jnp.zeros(feature.shape, dtype)


def _step(
    embed: OfTarget, params: ModelParams, state: tuple[Array, Array], depth: Any, tokens: Array
) -> tuple[Array, tuple[Array, Array]]:
    feature, past = state
    own, token = params.draft, embed(params.target, tokens)
    if "rnn" in own:
        w, u = own["rnn"]["w"]["kernel"], own["rnn"]["u"]
        past = jax.nn.silu(matmul(token, w) + matmul(past, u["kernel"]) + u["bias"])
    else:
        past = past + token
    hidden = jnp.concatenate([feature, past], -1)
    if "input_proj" in own:
        hidden = affine(own["input_proj"], hidden)
    for layer in range(len(own["block"])):
        hidden = hidden + jax.nn.silu(affine(own["block"][str(layer)], hidden))
    return in_float32(matmul(hidden, own["head"]["kernel"])), (feature, past)


def _start(
    ends: Ends, layers: int, inner: int, running_sum: bool, target_params: Params, key: Array
) -> Params:
    """New parameters, which begin as the target's own map of the feature and not as noise."""
    kernel = ends.output_kernel(target_params)
    width, vocab = kernel.shape
    params: dict[str, Any] = {
        "block": {str(layer): _heads.zeros(inner, inner) for layer in range(layers)},
        "head": {"kernel": jnp.zeros((inner, vocab)).at[:width].set(kernel[:inner])},
    }
    if inner != 2 * width:
        params["input_proj"] = {"kernel": jnp.eye(2 * width, inner), "bias": jnp.zeros(inner)}
    if not running_sum:
        w, u = jax.random.normal(key, (2, width, width)) / math.sqrt(width)
        params["rnn"] = {"w": {"kernel": w}, "u": {"kernel": u, "bias": jnp.zeros(width)}}
    return params


class _Files(Codec):
    """D is the target's width, F the blocks' (``exit_dim``)."""

    files = ("model.safetensors", "pytorch_model.bin")
    tables: ClassVar = {
        "redrafter": (
            *linear("rnn_u", "rnn.u", "D D", "", "rnn"),
            *linear("rnn_w", "rnn.w", "D D", parts="rnn"),
            *linear("input_proj", "input_proj", "2D F", "", "input_proj"),
            *linear("lm_head.{i}.linear", "block.{i}", "F F", "", "?input_proj"),
            *linear("lm_head.{i}.linear", "block.{i}", "2D 2D", "", "!input_proj"),
            *linear("lm_head.{I}", "head", "F V", parts="?input_proj"),
            *linear("lm_head.{I}", "head", "2D V", parts="!input_proj"),
        )
    }
    layouts = ("redrafter",)
    types = ("recurrent_drafting_drafter", "redrafter")
    architectures = ("Drafter",)

    def select(self, where: Path, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
        return plain_names(where, self.kind, tensors)

    def facts(self, found: Found, leaves: Leaves, sizes: Sizes) -> Config:
        rnn = ("rnn", "w", "kernel") in leaves
        switch(found.where, found.config, "rnn")
        check_part(found.where, found.config, "rnn", rnn, "a recurrent layer")
        return super().facts(found, leaves, sizes) | {
            "exit_dim": len(leaves["block", "0", "bias"]),
            "num_draft_layers": len({path[1] for path in leaves if path[0] == "block"}),
            "rnn": rnn,
        }


CODEC = _Files("redrafter")
