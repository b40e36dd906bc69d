"""Falcon: EAGLE with blocks, so that one pass of the draft network gives several tokens.

Gao et al. 2024 (2412.12639). Two LSTM layers read [embedding of token t + 1 ; feature of token t];
a decoder layer with a relaxed causal mask, in which a place sees its whole block of k places,
estimates the feature k tokens ahead. The target's embedding and LM head are shared. One pass over
the newest k places gives the next k tokens, and the pass after it reads the path through them: a
draft of m k tokens costs m passes.

The tokens of a block are drawn independently of each other, so they are less often right than
EAGLE's; the next block depends on them. Without keys the draft is EAGLE-2's dynamic tree; trees and
chains are a multiple of k deep. Siblings "top_k" and dynamic trees are deterministic: L1 with
"deterministic", "match" and other rules for such drafts. Drafts sampled from the network's
probabilities are L1 with "chain", "recursive" and their variants.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from specjax.bound import Bound
from specjax.checks import whole
from specjax.drafters._keys import NetworkKeys
from specjax.drafters.heads import _eagle_shape, _falcon, _falcon_layers, _falcon_text, _given
from specjax.drafters.heads._falcon_layers import FalconShape
from specjax.drafters.heads._falcon_network import Net
from specjax.drafters.heads._given import Given
from specjax.drafters.heads._network import Shape
from specjax.errors import UserError
from specjax.types import LM, Drafter, Params

REFERENCE = "gao2024falcon"

SHARED = NetworkKeys
NAME = _falcon.NAME
# k of a new network: the best one of the paper.
BLOCK = 2


def make(target: LM, *, block: int = 0, **shared: Any) -> Drafter:
    """Drafts with a Falcon network.

    Args:
        target: the model whose features it reads.
        block: k, the tokens of one pass; 0: as in the files, or 2. Parameters without files do not
            show it.
        shared: the keys of ``NetworkKeys``.

    Raises:
        UserError: files without a network or of another target, sizes or a block that differ from
            the files, a tree that does not fit or is not a multiple of k deep.
    """
    given = _given.read(NAME, target, keys := NetworkKeys(**shared))
    size, width = _block(given, block), given.ends.width
    own = given
    if given.params is not None:
        _check_width(given.params, width)
        # The layer of a network without fc is read as that of one with it.
        own = given._replace(params=given.params | {"fc": {"kernel": np.zeros((0, width))}})
    config = _eagle_shape.config_of(NAME, own, width, keys)
    shape = FalconShape(config, size)
    if given.params is not None:
        _check_params(shape, given.params)
    dtype = jnp.float32
    if given.params is not None:
        dtype = jnp.dtype(given.params["lstm"]["0"]["input"]["kernel"].dtype)
    facts = (*_eagle_shape.facts(Shape(config, width)), ("block_size", size))
    net = Net(shape, given.ends, jnp.dtype(dtype))
    training = Bound(_falcon_text.training, net, target, facts=facts)
    return _falcon.build(target, net, keys, given, training)


def _block(given: Given, asked: int) -> int:
    """k. Raises UserError for another one than that of the files."""
    whole("block", asked, 0)
    stored = given.config.get("block_size")
    if given.config and stored is None:
        raise UserError("config.json of the falcon network lacks block_size; add the tokens of one")
    if stored is None:
        return asked or BLOCK
    whole("block_size of the falcon network", stored, 1)
    if asked not in (0, stored):
        raise UserError(
            f"block is {asked}, and the given network was trained for blocks of {stored}; leave it "
            "out, or train another network"
        )
    return stored


def _check_width(params: Params, width: int) -> None:
    """Raises UserError for parameters without an LSTM, or for features of another width."""
    rows, gates = _eagle_shape.matrix(NAME, params, "lstm.0.input.kernel")
    if (rows, gates) != (2 * width, 4 * width):
        raise UserError(
            f"the {NAME} network reads features of width {rows // 2}, and the target's have "
            f"{width}; use one made for this target"
        )


def _check_params(shape: FalconShape, params: Params) -> None:
    """Raises UserError unless ``params`` have exactly the leaves of a network of this shape."""
    if shape.config.num_layers != 1:
        raise UserError(
            f"the {NAME} network has {shape.config.num_layers} decoder layers; only networks of "
            "one layer can be computed"
        )
    module = nnx.to_pure_dict(_falcon_layers.abstract(shape, jnp.dtype(jnp.float32))[1])
    wanted: dict[Any, Any] = flatten_dict(module)
    sizes = _falcon_layers.lstm_shapes(shape.config.hidden_size)
    for path, size in flatten_dict({"lstm": sizes}).items():
        wanted[path] = jax.ShapeDtypeStruct(size, jnp.float32)
    _eagle_shape.check_leaves(NAME, wanted, flatten_dict(params))
