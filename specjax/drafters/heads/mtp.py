"""Multi-token prediction: further last layers, which all read the same hidden state of the target.

Gloeckle et al. 2024 (2404.19737, section 2). The target without its last layer is the trunk. Head 1
is the target's last layer; n - 1 further decoder layers of the same kind each read the trunk's
output z, and the target's own last norm and LM head give the probs of token t + 2, t + 3, ... So
all probs of a draft come from one hidden state and do not depend on the draft's tokens. Each head
attends to all z of the committed text, with a cache of its own.

The published models are pretrained with their heads (``config.mtp`` of objective pretrain); heads
for a target that was trained without them are trained beside it. Rules and lossless classes are
those of ``medusa``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads import _drafter, _family, _given, _mtp_trunk
from specjax.drafters.heads._mtp_trunk import TrunkShape
from specjax.types import LM, Drafter, ModelParams, Params

REFERENCE = "gloeckle2024better"

SHARED = HeadKeys
NAME = "mtp"
HEADS = 3


def make(target: LM, **shared: Any) -> Drafter:
    """Drafts with further last layers of the target.

    Args:
        target: the model whose layers but the last are the trunk.
        shared: the keys of ``HeadKeys``; ``heads`` is the number of heads without the target's own
            last layer (the paper's n - 1), 3 for new ones.

    Raises:
        UserError: files without heads or of another target, a target of one layer or with experts
            in its last one, another number of heads than the files have, a draft deeper than there
            are heads.
    """
    shape, given, keys = _read(target, HeadKeys(**shared))
    dtype = jnp.float32 if given.params is None else jax.tree.leaves(given.params)[0].dtype
    logits = Bound(_logits, target)
    family = _family.Heads(
        name=NAME,
        depth=shape.heads,
        begin=Bound(_begin, shape.heads),
        step=Bound(_step, logits),
        start=Bound(_mtp_trunk.start, shape, target),
        every=Bound(_every, logits),
        prefix=_mtp_trunk.build(shape, dtype),
        taps=((target.layers or 0) - 2,),
        facts=_mtp_trunk.facts(target, shape),
    )
    return _drafter.build(target, family, keys, given)


def new(target: LM, key: jax.Array, heads: int = HEADS) -> Params:
    """Random parameters, to train heads together with a target that is trained from scratch."""
    return _mtp_trunk.new(TrunkShape(*_mtp_trunk.last_layer(NAME, target), heads), key)


def _read(target: LM, keys: HeadKeys) -> tuple[TrunkShape, _given.Given, HeadKeys]:
    """The shape of the heads, and the given ones. Raises UserError."""
    config, layer = _mtp_trunk.last_layer(NAME, target)
    given = _given.read(NAME, target, keys)
    stored = None if given.params is None else (len(given.params["layers"]),)
    (heads,) = _given.sizes(stored, heads=(keys.heads, HEADS))
    shape = TrunkShape(config, layer, heads)
    if given.params is not None:
        _mtp_trunk.check(NAME, target, shape, given)
    return shape, given, keys


def _begin(heads: int, params: ModelParams, features: jax.Array) -> jax.Array:
    """[...,K*E] -> [...,K,E]: the outputs of the layers."""
    del params
    return features.reshape(*features.shape[:-1], heads, -1)


def _step(
    logits: Any, params: ModelParams, state: jax.Array, depth: Any, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``Heads.step``: head ``depth`` predicts, whatever the draft's tokens."""
    del tokens
    return logits(params, jnp.take(state, depth, axis=-2)), state


def _every(logits: Any, params: ModelParams, state: jax.Array) -> jax.Array:
    """``Heads.every``: [...,K,E] -> f[K,...,V]."""
    return logits(params, jnp.moveaxis(state, -2, 0))


def _logits(target: LM, params: ModelParams, x: jax.Array) -> jax.Array:
    """The target's own last norm, if it has one, and its LM head."""
    assert target.unembed is not None
    if target.last_norm is not None:
        x = target.last_norm(params.target, x)
    return target.unembed(params.target, x)
