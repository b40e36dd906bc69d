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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import whole, yes_or_no
from specjax.drafters._growth.plans import BEAM
from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads import _drafter, _family, _given
from specjax.errors import UserError
from specjax.models.logits import in_float32
from specjax.models.short_blocks import matmul
from specjax.types import LM, Drafter, ModelParams, Params

REFERENCE = "cheng2024recurrent"

SHARED = HeadKeys
# The authors' values.
STEPS, LAYERS = 5, 2


def make(
    target: LM, *, layers: int = 0, inner: int = 0, running_sum: bool = False, **shared: Any
) -> Drafter:
    """Drafts with a recurrent network.

    Args:
        target: the model whose features and embedding the network reads.
        layers: number of blocks; 0: as in the files, or 2 for a new network.
        inner: F, width of the blocks; 0: as in the files, or twice the target's width.
        running_sum: whether the state of a new network is the sum of the embeddings; in files the
            tensors decide, and True is an error where they have a recurrent network.
        shared: the keys of ``HeadKeys``; ``heads`` is the number of steps that training predicts
            and the default depth of a draft, 5 if the files have no number. The default ``tree``
            is "beam", and ``model`` may be a released one.

    Raises:
        UserError: files of another method or target, sizes that differ from the files, a tree that
            does not fit.
    """
    keys = HeadKeys(**shared)
    yes_or_no("running_sum", running_sum)
    given = _given.read("redrafter", target, keys)
    stored, width = None, given.ends.width
    if given.params is not None:
        block = given.params["block"]
        stored = len(block), block["0"]["bias"].shape[0]
        if running_sum and "rnn" in given.params:
            raise UserError(
                "running_sum is set, and the given heads have a recurrent network; leave it out"
            )
        running_sum = "rnn" not in given.params
    layers, inner = _given.sizes(stored, layers=(layers, LAYERS), inner=(inner, 2 * width))
    steps = keys.heads or whole("n_predict", given.config.get("n_predict", STEPS), 1)
    family = _family.Heads(
        name="redrafter",
        depth=steps,
        begin=_begin,
        step=Bound(_step, given.ends.embed),
        start=Bound(_start, target, layers, inner, running_sum),
        looped=True,
        tree=BEAM,
        facts=(("n_predict", steps),),
    )
    return _drafter.build(target, family, keys, given)


def _begin(params: ModelParams, feature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state is the feature [...,D] and s [...,D]."""
    dtype = jnp.result_type(feature, params.draft["head"]["kernel"])
    return feature, jnp.zeros(feature.shape, dtype)


def _step(
    embed: Callable[[Params, jax.Array], jax.Array],
    params: ModelParams,
    state: tuple[jax.Array, jax.Array],
    depth: Any,
    tokens: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    del depth
    feature, past = state
    own, token = params.draft, embed(params.target, tokens)
    if "rnn" in own:
        w, u = own["rnn"]["w"]["kernel"], own["rnn"]["u"]
        past = jax.nn.silu(matmul(token, w) + matmul(past, u["kernel"]) + u["bias"])
    else:
        past = past + token
    hidden = jnp.concatenate([feature, past], -1)
    if "input_proj" in own:
        hidden = matmul(hidden, own["input_proj"]["kernel"]) + own["input_proj"]["bias"]
    for layer in range(len(own["block"])):
        block = own["block"][str(layer)]
        hidden = hidden + jax.nn.silu(matmul(hidden, block["kernel"]) + block["bias"])
    return in_float32(matmul(hidden, own["head"]["kernel"])), (feature, past)


def _start(
    target: LM, layers: int, inner: int, running_sum: bool, target_params: Params, key: jax.Array
) -> Params:
    """New parameters, which begin as the target's own map of the feature and not as noise."""
    kernel = _family.output_kernel(target, target_params)
    width, vocab = kernel.shape
    params: dict[str, Any] = {
        "block": {
            str(layer): {"kernel": jnp.zeros((inner, inner)), "bias": jnp.zeros(inner)}
            for layer in range(layers)
        },
        "head": {"kernel": jnp.zeros((inner, vocab)).at[:width].set(kernel[:inner])},
    }
    if inner != 2 * width:
        params["input_proj"] = {"kernel": jnp.eye(2 * width, inner), "bias": jnp.zeros(inner)}
    if not running_sum:
        w, u = jax.random.normal(key, (2, width, width)) / math.sqrt(width)
        params["rnn"] = {"w": {"kernel": w}, "u": {"kernel": u, "bias": jnp.zeros(width)}}
    return params
