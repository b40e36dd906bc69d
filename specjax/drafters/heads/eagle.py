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

import functools
from typing import Any

from specjax import references
from specjax.drafters._keys import EagleKeys
from specjax.drafters.heads import (
    _eagle_shape,
    _features,
    _given,
    _network,
    _rollout,
    _rollout_loss,
)
from specjax.drafters.heads._eagle_shape import Sizes
from specjax.drafters.heads._network import Shape
from specjax.errors import UserError
from specjax.types import LM, Drafter

LI2024EAGLE = """\
@inproceedings{li2024eagle,
  title = {{EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty}},
  author = {Li, Yuhui and Wei, Fangyun and Zhang, Chao and Zhang, Hongyang},
  booktitle = {International Conference on Machine Learning},
  year = {2024},
  eprint = {2401.15077},
  archiveprefix = {arXiv},
}"""
ZHANG2024HASS = """\
@misc{zhang2024learning,
  title = {{Learning Harmonized Representations for Speculative Sampling}},
  author = {Zhang, Lefan and Wang, Xiaodan and Huang, Yanhua and Xu, Ruiwen},
  year = {2024},
  eprint = {2408.15766},
  archiveprefix = {arXiv},
}"""
REFERENCE = (LI2024EAGLE, references.LI2024EAGLE2, ZHANG2024HASS)

SHARED = EagleKeys


def make(
    target: LM,
    *,
    layers: int = 0,
    heads: int = 0,
    kv_heads: int = 0,
    head_dim: int = 0,
    inner: int = 0,
    qk_norm: bool = False,
    shift: int = 1,
    **shared: Any,
) -> Drafter:
    """Drafts with an EAGLE network.

    Args:
        target: the model whose features it reads.
        layers: decoder layers; 0: as in the files, or 1 for a new network.
        heads: attention heads; 0: as in the files, or width / ``head_dim`` for a new network.
        kv_heads: key and value heads; 0: as in the files, or ``heads`` for a new network.
        head_dim: width of an attention head; 0: as in the files, or the largest even divisor of the
            width up to 64.
        inner: width of the feed-forward; 0: as in the files, or 8/3 of the width.
        qk_norm: whether a new network has a norm of each head's queries and keys; in files the
            tensors decide, and True is an error where they are missing.
        shift: 1: a slot reads the token after that of its feature. 0 is an ablation: the token of
            its feature, so a node's children do not depend on its own token.
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
    sizes = Sizes(layers, heads, kv_heads, head_dim, inner, qk_norm)
    config = _eagle_shape.config_of(name, given, width, sizes)
    bias = given.params is None or "bias" in given.params["fc"]
    shape = Shape(config, width, fc_bias=bias, shift=_eagle_shape.shift_of(given, shift))
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
    training = functools.partial(_rollout.training, network, target, defaults=_rollout_loss.EAGLE)
    return _features.build(target, network, keys, given, training)
