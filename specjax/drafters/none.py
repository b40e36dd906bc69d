"""No drafter: plain autoregressive decoding with the same loop."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.types import LM, Draft, Drafter


def _propose(params, keys, context, state):
    batch = context.length.shape[0]
    return Draft(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0), bool)), state


_DRAFTER = Drafter(_propose, nodes=0, name="none")


def make(target: LM) -> Drafter:
    """A drafter that proposes no token, so every round emits one token of the target. L1."""
    return _DRAFTER
