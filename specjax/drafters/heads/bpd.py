"""Blockwise parallel decoding: p_2, p_3, ... are feed-forward layers before the target's LM head.

Stern et al. 2018 (1811.03115). Slot k >= 2 gives unembed(h + W2 relu(W1 h + b1) + b2), with W2 zero
when training begins. The authors have one joint layer D -> kF -> kD for all slots; ours is a
separate layer D -> F -> D for each. Slot 1 is the target itself: it has no such layer (the authors'
has), so p_1, which verifies, is unchanged.

Rules and lossless classes are those of ``medusa``. The paper's own recipe is
``config.loss.slots = "one"``, one random slot per batch, and for its fine-tuned models
``config.joint``. The paper's lossy rules are ``tolerance`` and its variants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import references
from specjax.checks import whole
from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads import _drafter, _family, _given
from specjax.models.short_blocks import matmul
from specjax.types import LM, Drafter, Params

REFERENCE = references.STERN2018BLOCKWISE

SHARED = HeadKeys
HEADS = 3
# Inner width divided by the target's width, as in a usual feed-forward layer.
WIDER = 4


def make(target: LM, *, inner: int = 0, **shared: Any) -> Drafter:
    """Drafts with the extra slots of blockwise parallel decoding.

    Args:
        target: the model whose features and LM head the slots use.
        inner: width inside their layers; 0: as in the files, or four times the target's for new
            slots.
        shared: the keys of ``HeadKeys``; ``heads`` is the number of slots without the target's own
            (the paper's k - 1), 3 for new ones.

    Raises:
        UserError: files without slots or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    keys = HeadKeys(**shared)
    whole("inner", inner, 0)
    given = _given.read("bpd", target, keys)
    width, _, unembed = given.ends
    stored = None if given.params is None else given.params["up"]["bias"].shape
    heads, inner = _given.sizes(stored, heads=(keys.heads, HEADS), inner=(inner, WIDER * width))
    head = functools.partial(_head, unembed)
    family = _family.Heads(
        name="bpd",
        depth=heads,
        begin=_family.begin_with_feature,
        step=functools.partial(_family.step_of, head),
        start=functools.partial(_start, heads, width, inner),
        every=functools.partial(_family.at_all_depths, head),
    )
    return _drafter.build(target, family, keys, given)


def _head(
    unembed: Callable[[Params, jax.Array], jax.Array],
    own: Params,
    target_params: Params,
    feature: jax.Array,
) -> jax.Array:
    up, down = own["up"], own["down"]
    inside = jax.nn.relu(matmul(feature, up["kernel"]) + up["bias"])
    return unembed(target_params, feature + matmul(inside, down["kernel"]) + down["bias"])


def _start(heads: int, width: int, inner: int, target_params: Params, key: jax.Array) -> Params:
    del target_params
    up = jax.random.normal(key, (heads, width, inner)) / math.sqrt(width)
    return {
        "up": {"kernel": up, "bias": jnp.zeros((heads, inner))},
        "down": {"kernel": jnp.zeros((heads, inner, width)), "bias": jnp.zeros((heads, width))},
    }
