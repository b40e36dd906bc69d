"""Blockwise parallel decoding: p_2, p_3, ... are feed-forward layers before the target's LM head.

Stern et al. 2018 (1811.03115). Slot k >= 2 gives unembed(h + W2 relu(W1 h + b1) + b2), with W2 zero
when training begins. ``layer="joint"`` is the authors' one layer D -> kF -> kD, in which each slot
reads the hidden units of all; "separate", the default, is a layer D -> F -> D for each slot. Slot 1
is the target itself: it has no such layer (the authors' has), so p_1, which verifies, is unchanged.

Rules and lossless classes are those of ``medusa``. The paper's own recipe is
``config.loss.slots = "one"``, one random slot per batch, and for its fine-tuned models
``config.joint``. The paper's lossy rules are ``tolerance`` and its variants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import one_of, whole
from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads import _drafter, _family, _given
from specjax.errors import UserError
from specjax.models.short_blocks import matmul
from specjax.types import LM, Drafter, ModelParams, Params

REFERENCE = "stern2018blockwise"

SHARED = HeadKeys
HEADS = 3
# Inner width divided by the target's width, as in a usual feed-forward layer.
WIDER = 4
LAYERS = ("separate", "joint")


def make(target: LM, *, inner: int = 0, layer: str = "", **shared: Any) -> Drafter:
    """Drafts with the extra slots of blockwise parallel decoding.

    Args:
        target: the model whose features and LM head the slots use.
        inner: width inside their layers; 0: as in the files, or four times the target's for new
            slots.
        layer: "separate" or "joint", see above; "": as in the files, or separate for new slots.
        shared: the keys of ``HeadKeys``; ``heads`` is the number of slots without the target's own
            (the paper's k - 1), 3 for new ones.

    Raises:
        UserError: files without slots or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    keys = HeadKeys(**shared)
    whole("inner", inner, 0)
    if layer:
        one_of("layer", layer, LAYERS)
    given = _given.read("bpd", target, keys)
    width, _, unembed = given.ends
    stored = None if given.params is None else given.params["up"]["bias"].shape
    heads, inner = _given.sizes(stored, heads=(keys.heads, HEADS), inner=(inner, WIDER * width))
    joint, head = _is_joint(given.params, layer), Bound(_head, unembed)
    family = _family.Heads(
        name="bpd",
        depth=heads,
        begin=_family.begin_with_feature,
        step=_joint_step(unembed) if joint else Bound(_family.step_of, head),
        start=Bound(_start, heads, width, inner, joint),
        every=Bound(_joint_every, unembed) if joint else Bound(_family.at_all_depths, head),
    )
    return _drafter.build(target, family, keys, given)


def _is_joint(params: Params | None, layer: str) -> bool:
    """Whether the slots are one joint layer. Raises UserError if the given ones are not so."""
    if params is None:
        return layer == "joint"
    stored = LAYERS[params["down"]["kernel"].shape[1] != params["up"]["kernel"].shape[2]]
    if layer not in ("", stored):
        raise UserError(f"layer is {layer}, and the given heads have {stored}; leave it out")
    return stored == "joint"


def _head(
    unembed: Callable[[Params, jax.Array], jax.Array],
    own: Params,
    target_params: Params,
    feature: jax.Array,
) -> jax.Array:
    inside = _inside(own["up"], feature)
    return unembed(target_params, feature + _linear(own["down"], inside))


def _linear(own: Params, x: jax.Array) -> jax.Array:
    return matmul(x, own["kernel"]) + own["bias"]


def _inside(up: Params, feature: jax.Array) -> jax.Array:
    """[...,I]: the hidden units of a slot."""
    return jax.nn.relu(_linear(up, feature))


def _joint_inside(up: Params, feature: jax.Array) -> jax.Array:
    """[...,K*I]: the hidden units of all slots."""
    features = jnp.broadcast_to(feature, (len(up["bias"]), *feature.shape))
    units = jnp.moveaxis(jax.vmap(_inside)(up, features), 0, -2)
    return units.reshape(*feature.shape[:-1], -1)


def _joint_step(unembed: Callable[[Params, jax.Array], jax.Array]) -> Callable[..., Any]:
    """``Heads.step`` of a joint layer."""

    def step(params: ModelParams, feature: jax.Array, depth: Any, tokens: jax.Array):
        del tokens
        down = jax.tree.map(lambda x: x[depth], params.draft["down"])
        out = _linear(down, _joint_inside(params.draft["up"], feature))
        return unembed(params.target, feature + out), feature

    return step


def _joint_every(
    unembed: Callable[[Params, jax.Array], jax.Array], params: ModelParams, feature: jax.Array
) -> jax.Array:
    """``Heads.every`` of a joint layer."""
    inside, down = _joint_inside(params.draft["up"], feature), params.draft["down"]
    units = jnp.broadcast_to(inside, (len(down["bias"]), *inside.shape))
    return unembed(params.target, feature + jax.vmap(_linear)(down, units))


def _start(
    heads: int, width: int, inner: int, joint: bool, target_params: Params, key: jax.Array
) -> Params:
    del target_params
    up = jax.random.normal(key, (heads, width, inner)) / math.sqrt(width)
    read = heads * inner if joint else inner
    return {
        "up": {"kernel": up, "bias": jnp.zeros((heads, inner))},
        "down": {"kernel": jnp.zeros((heads, read, width)), "bias": jnp.zeros((heads, width))},
    }
