"""Heads on the target's last feature as pure functions: one description for decoding and training.

The feature f of a token is the vector that the target's LM head multiplies. With tokens[t] pending,
heads read f[t-1] (the feature that the pending token was drawn from); the head of depth d, counted
from 0, predicts tokens[t+1+d]. Drafting and training call the same ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.drafters.heads._prefix import Prefix
from specjax.errors import UserError
from specjax.types import LM, Params


class Heads(NamedTuple):
    """A family of heads as pure functions of the parameters ``ModelParams`` and a state.

    Leading dimensions [...] are free. ``begin(params, feature [...,E]) -> state``.
    ``step(params, state, depth, tokens i32[...]) -> (logits f[...,V], state)``: ``tokens`` is the
    newest token, which is the pending one at depth 0 and then the draft's own.
    """

    name: str
    depth: int  # how many heads
    begin: Callable[..., Any]
    step: Callable[..., tuple[jax.Array, Any]]
    # (target_params, key) -> new parameters to start training with.
    start: Callable[..., Params]
    # Whether ``step`` ignores tokens, takes a traced depth and returns the state unchanged.
    independent: bool = False
    # None: heads read one feature.
    prefix: Prefix | None = None
    # Whether all depths have the same parameters: a draft may be deeper than ``depth``, and
    # ``step`` takes a traced depth.
    looped: bool = False
    # The shape of a draft without keys, as ``Method.tree``; "": a chain of ``depth`` tokens.
    tree: str = ""
    # What config.json must hold about the parameters in addition to their shapes.
    facts: tuple[tuple[str, Any], ...] = ()


class Ends(NamedTuple):
    """What heads use of their target: the width E, the first and the last map (see ``LM``)."""

    width: int
    embed: Callable[[Params, jax.Array], jax.Array]
    unembed: Callable[[Params, jax.Array], jax.Array]


def ends(name: str, target: LM) -> Ends:
    """Raises UserError for a target without features."""
    if target.embed is None or target.unembed is None or target.width is None:
        raise UserError(f"{name} reads the features of its target, and {target.name} has none")
    return Ends(target.width, target.embed, target.unembed)


def begin_with_feature(params: Any, feature: jax.Array) -> jax.Array:
    """``Heads.begin`` where the state is the feature itself."""
    del params
    return feature


def output_kernel(target: LM, target_params: Params) -> jax.Array:
    """The target's LM head as a matrix f32[E,V], bit for bit if its parameters are float32."""
    width, _, unembed = ends("a head", target)
    # By default accelerators multiply float32 in fewer bits.
    with jax.default_matmul_precision("highest"):
        return unembed(target_params, jnp.eye(width))


def in_float32(values: jax.Array) -> jax.Array:
    """In float32 at least: the dtype of logits and probabilities."""
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))
