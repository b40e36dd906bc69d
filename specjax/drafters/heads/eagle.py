"""EAGLE: a small decoder continues the target's features, and reads the token one step ahead.

EAGLE-1 (Li et al. 2024, 2401.15077, section 4): slot t reads fc([embedding of token t + 1 ; feature
of token t]) and predicts the next feature; the target's own LM head turns it into probabilities of
token t + 2. Without keys the draft is EAGLE-2's dynamic tree (Li et al. 2024, 2406.16858, section
4); ``gamma`` and ``tree`` give EAGLE-1's chains and fixed trees. HASS (Zhang et al. 2024,
2408.15766) trains the same network in another way, so its files are read here too.

A dynamic tree, and siblings "top_k", are deterministic: L1 with "deterministic", "match" and other
rules for such drafts. Drafts sampled from the network's probabilities are L1 with "recursive" and
its variants.
"""

from __future__ import annotations

from typing import Any

from specjax.bound import Bound
from specjax.drafters._keys import EagleKeys
from specjax.drafters.heads import (
    _eagle_shape,
    _features,
    _given,
    _network,
    _rollout,
    _rollout_loss,
)
from specjax.drafters.heads._network import Shape
from specjax.errors import UserError
from specjax.types import LM, Drafter

REFERENCE = ("li2024eagle", "li2024eagle2", "zhang2024learning")

SHARED = EagleKeys


def make(target: LM, **shared: Any) -> Drafter:
    """Drafts with an EAGLE network.

    Args:
        target: the model whose features it reads.
        shared: the keys of ``EagleKeys``; ``model`` may be a released network (EAGLE, HASS).

    Raises:
        UserError: files without a network or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    keys, name = EagleKeys(**shared), "eagle"
    given = _given.read(name, target, keys)
    width = given.ends.width
    if given.params is not None:
        rows, own = _eagle_shape.matrix(name, given.params, "fc.kernel")
        if (rows, own) != (2 * width, width):
            raise UserError(
                f"the {name} network reads features of width {rows - own} and gives {own}, and the "
                f"target's have {width}; use one made for this target"
            )
    config = _eagle_shape.config_of(name, given, width, keys)
    bias = given.params is None or "bias" in given.params["fc"]
    shape = Shape(config, width, fc_bias=bias, shift=_eagle_shape.shift_of(given, keys.shift))
    if given.params is not None:
        _eagle_shape.check(name, target, shape, given.params)
    network = _network.build(
        name,
        shape,
        given.ends,
        own_embedding=given.params is not None and "embed" in given.params,
        dtype=_eagle_shape.dtype_of(given.params),
        facts=_eagle_shape.facts(shape),
    )
    training = Bound(_rollout.training, network, target, defaults=_rollout_loss.EAGLE)
    return _features.build(target, network, keys, given, training)
