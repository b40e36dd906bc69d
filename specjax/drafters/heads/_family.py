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
from specjax.types import LM, ModelParams, Output, Params


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
    # (params, state) -> f[K,...,V], the logits of all depths in one pass, for heads that do not
    # read the draft's tokens: ``step`` then takes a traced depth and returns the state unchanged.
    # None: heads read them.
    every: Callable[..., jax.Array] | None = None
    # None: heads read one feature.
    prefix: Prefix | None = None
    # The layer of the target whose output they read in the place of its last feature, as a tuple of
    # one number; (): none.
    taps: tuple[int, ...] = ()
    # Whether all depths have the same parameters: a draft may be deeper than ``depth``, and
    # ``step`` takes a traced depth.
    looped: bool = False
    # The shape of a draft without keys, as ``Method.tree``; "": a chain of ``depth`` tokens.
    tree: str = ""
    # What config.json must hold about the parameters in addition to their shapes.
    facts: tuple[tuple[str, Any], ...] = ()

    def read(self, out: Output) -> jax.Array:
        """[B,T,E]: what they read of the target's output."""
        return out.taps[0] if self.taps else out.hidden

    @property
    def independent(self) -> bool:
        """Whether the logits depend on the depth alone and not on the draft's tokens."""
        return self.every is not None


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


def step_of(
    head: Callable[[Params, Params, jax.Array], jax.Array],
    params: ModelParams,
    feature: jax.Array,
    depth: Any,
    tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """``Heads.step`` of heads that do not read the draft's tokens, see ``at_all_depths``."""
    del tokens
    own = jax.tree.map(lambda x: x[depth], params.draft)
    return head(own, params.target, feature), feature


def at_all_depths(
    head: Callable[[Params, Params, jax.Array], jax.Array],
    params: ModelParams,
    feature: jax.Array,
) -> jax.Array:
    """f[K,...,V]: ``Heads.every`` of ``head(parameters of one head, the target's, feature)``.

    The leaves of ``params.draft`` are stacked on axis 0. One product of stacks reads the kernels in
    place; taking one head of a stack copies its kernels.
    """
    heads = jax.tree.leaves(params.draft)[0].shape[0]
    # The feature is repeated: without a stacked axis of its own, the kernels would be transposed.
    features = jnp.broadcast_to(feature, (heads, *feature.shape))
    return jax.vmap(head, (0, None, 0))(params.draft, params.target, features)


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
