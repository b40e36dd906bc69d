"""Early exit: the first layers of the target and its head draft. L1 with the rule "chain".

LayerSkip, Elhoushi et al. 2024 (2404.16710), section 4.3, for the drafts; Draft & Verify, Zhang et
al. 2023 (2309.08168), for the idea. The keys and values of the first layers are the target's own
for all committed tokens, so the drafter has no cache and no parameters.
"""

from __future__ import annotations

from typing import Any

from specjax import references
from specjax.checks import whole
from specjax.drafters import _growth
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import TreeKeys
from specjax.drafters.self_speculation import _own_cache
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import LM, Drafter, Sublayers

REFERENCE = references.LEVIATHAN2023FAST

SHARED = TreeKeys
GAMMA = 5


def make(target: LM, *, exit_layer: int, gamma: int | None = None, **shared: Any) -> Drafter:
    """Drafts with the first ``exit_layer`` layers of the target.

    Args:
        target: the model to be accelerated.
        exit_layer: how many of its layers are computed, from 1 to all.
        gamma: draft tokens per round of a chain; None: 5.
        shared: the keys of ``TreeKeys``; the default is a chain, drawn from the exit's
            probabilities ("iid").

    Raises:
        UserError: an exit layer that the target does not have, a shape that does not fit.
    """
    keys = TreeKeys(**shared)
    if gamma is not None and keys.tree:
        raise UserError(f"gamma is {gamma} and the tree is given too; give one of them")
    gamma = GAMMA if gamma is None else whole("gamma", gamma, 1)
    layers = range(whole("exit_layer", exit_layer, 1))
    if target.layers is None or exit_layer > target.layers:
        raise UserError(
            f"exit_layer is {exit_layer}, and {target.name} has {target.layers or 'no'} layers "
            "that can be read"
        )
    model = target.with_part(Sublayers(tuple(layers), tuple(layers)))
    method = Method("early_exit", shapes.chain(gamma), "iid", target.vocab_size)
    return _own_cache.build("early_exit", _own_cache.Inner(model), _growth.read(method, keys))
