"""Stops a draft after a token whose distribution had a high entropy. Per row.

SVIP (Zhang et al. 2024, 2411.18462): the acceptance probability of a token is at least
1 - sqrt(KL / 2), and the divergence of the target from the draft is about a constant times the
draft's entropy H. A draft ends after the first token with sqrt(scale H) > ``most``. That token
stays in the draft, so the length depends on nothing that is left out. H is in nats, of the draft's
own probabilities without the row's temperature and cut-offs.

A tree stops as a whole: when the entropy was high at all places of a level.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.control._controller import Ahead, Controller, entropies
from specjax.declare import key
from specjax.types import Array, Context

REFERENCE = "zhang2025draft"


class Keys(declare.Keys, owner="entropy's "):
    """The keys of ``entropy``."""

    most: float = key(
        0.3, "the highest sqrt(``scale`` entropy) of a token after which the draft goes on", least=0
    )
    scale: float = key(0.15, "the factor of the entropy", above=0)


@declare.method(Keys)
def make(keys: Keys) -> Controller:
    """Goes on after tokens of low entropy.

    Raises:
        UserError: a negative number.
    """
    return Controller(f"entropy:{keys.most:g}", Bound(_ask, keys.most**2 / keys.scale), _init)


def _init(context: Context) -> Array:
    """bool[B]: whether the newest level of the draft that grows had a low entropy."""
    return jnp.ones(context.length.shape, bool)


def _ask(most: float, sure: Array, ahead: Ahead) -> tuple[Array, Array]:
    low = (entropies(ahead.logits) <= most) & ahead.valid
    # What is left from the round before does not count: every draft has a first token.
    return sure | (jnp.asarray(ahead.depth) == 0), low.any(-1)
