"""Stops a draft where the draft model is unsure: its highest probability is below a threshold.

The idea of the confidence threshold of assisted generation (transformers' dynamic speculation) and
of SVIP and AdaEDL, asked before the token is drawn, so that the output law does not change. The
probability is the draft's own, without the row's temperature and cut-offs: it has the same meaning
at every temperature, and is not 1 under greedy decoding.

A tree stops as a whole: when the highest probability is below the threshold at all places of a
level, so at the best of them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.control._controller import Ahead, Controller
from specjax.declare import key
from specjax.types import Array

REFERENCE = ("mamou2024dynamic", "zhang2025draft", "agrawal2024adaedl")


class Keys(declare.Keys, owner="the threshold's "):
    """The keys of ``threshold``."""

    least: float = key(
        help="the highest probability after which the draft goes on", least=0, most=1
    )


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """Continues while the highest probability of the draft is at least ``least``.

    Raises:
        UserError: ``least`` out of range.
    """
    return Controller(f"threshold:{keys.least:g}", Bound(_ask, keys.least))


def _ask(least: float, state: Any, ahead: Ahead) -> tuple[Array, Any]:
    logits = ahead.logits.astype(jnp.promote_types(ahead.logits.dtype, jnp.float32))
    # The highest probability is 1 / sum(exp(logits - highest logit)).
    total = jnp.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
    return ((least * total <= 1) & ahead.valid).any(-1), state
