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
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import files
from specjax.drafters.files.codec import Codec, Config, Found, Leaves, Rules, Shapes, Sizes, linear
from specjax.drafters.heads.multi import _heads
from specjax.drafters.heads.multi._heads import OfTarget
from specjax.drafters.shared_keys import HeadKeys, stored_size
from specjax.models.layers import affine
from specjax.types import LM, Array, Drafter, ModelParams, Params

REFERENCE = "stern2018blockwise"

HEADS = 3
# Inner width divided by the target's width, as in a usual feed-forward layer.
WIDER = 4
LAYERS = ("separate", "joint")


def _layer(params: Params) -> str:
    """The value of ``layer`` in stored parameters."""
    return LAYERS[params["down"]["kernel"].shape[1] != params["up"]["kernel"].shape[2]]


class Keys(HeadKeys):
    """The keys of ``bpd``."""

    heads: int = stored_size(
        "slots without the target's own (the paper's k - 1)",
        lambda params: len(params["up"]["bias"]),
        new=HEADS,
    )
    inner: int = stored_size(
        "width inside their layers; 0: as in the files, or four times the target's for new slots",
        lambda params: params["up"]["bias"].shape[1],
    )
    layer: str = key(
        "",
        '"separate" or "joint", as the module says; "": as in the files, or separate for new slots',
        choices=("", *LAYERS),
        size=_layer,
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with the extra slots of blockwise parallel decoding.

    Raises:
        UserError: files without slots or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    given, keys = files.read("bpd", target, keys)
    width, _, unembed = given.ends
    heads, inner = keys.heads, keys.inner or WIDER * width
    joint, head = keys.layer == "joint", Bound(_head, unembed)
    family = _heads.Heads(
        name="bpd",
        depth=heads,
        step=Bound(_joint_step, unembed) if joint else Bound(_heads.step_of, head),
        start=Bound(_start, heads, width, inner, joint),
        every=Bound(_joint_every, unembed) if joint else Bound(_heads.at_all_depths, head),
    )
    return _heads.build(target, family, keys, given)


def _head(unembed: OfTarget, own: Params, target_params: Params, feature: Array) -> Array:
    return unembed(target_params, feature + affine(own["down"], _inside(own["up"], feature)))


def _inside(up: Params, feature: Array) -> Array:
    """[...,I]: the hidden units of a slot."""
    return jax.nn.relu(affine(up, feature))


def _joint_inside(up: Params, feature: Array) -> Array:
    """[...,K*I]: the hidden units of all slots."""
    features = jnp.broadcast_to(feature, (len(up["bias"]), *feature.shape))
    units = jnp.moveaxis(jax.vmap(_inside)(up, features), 0, -2)
    return units.reshape(*feature.shape[:-1], -1)


def _joint_step(
    unembed: OfTarget, params: ModelParams, feature: Array, depth: Any, *_: Any
) -> tuple[Array, Array]:
    """``Heads.step`` of a joint layer."""
    down = jax.tree.map(lambda x: x[depth], params.draft["down"])
    out = affine(down, _joint_inside(params.draft["up"], feature))
    return unembed(params.target, feature + out), feature


def _joint_every(unembed: OfTarget, params: ModelParams, feature: Array) -> Array:
    """``Heads.every`` of a joint layer."""
    inside, down = _joint_inside(params.draft["up"], feature), params.draft["down"]
    units = jnp.broadcast_to(inside, (len(down["bias"]), *inside.shape))
    return unembed(params.target, feature + jax.vmap(affine)(down, units))


def _start(
    heads: int, width: int, inner: int, joint: bool, target_params: Params, key: Array
) -> Params:
    up = jax.random.normal(key, (heads, width, inner)) / math.sqrt(width)
    read = heads * inner if joint else inner
    return {
        "up": {"kernel": up, "bias": jnp.zeros((heads, inner))},
        "down": {"kernel": jnp.zeros((heads, read, width)), "bias": jnp.zeros((heads, width))},
    }


class _Files(Codec):
    """No files were released: the names are specjax's."""

    files = ("bpd_heads.safetensors",)
    tables: ClassVar = {
        layer: (
            *linear("bpd.{i}.up", "up[{i}]", "D I", ""),
            *linear(f"bpd.{{i}}.{name}", "down[{i}]", f"{inner} D", ""),
        )
        for layer, name, inner in (("separate", "down", "I"), ("joint", "joint_down", "{I}I"))
    }

    def table(self, layout: str, shapes: Shapes, config: Mapping[str, Any]) -> Rules:
        up, down = (shapes.get((part, "kernel"), ()) for part in ("up", "down"))
        return self.tables["separate" if up[2:] == down[1:2] else "joint"]

    def facts(self, found: Found, leaves: Leaves, sizes: Sizes) -> Config:
        own = {"bpd_num_heads": len(leaves["up", "kernel"]), "inner_dim": sizes["I"]}
        return super().facts(found, leaves, sizes) | own


CODEC = _Files("bpd")
