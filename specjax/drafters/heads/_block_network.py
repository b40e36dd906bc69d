"""A block drafter as functions: the text as keys and values, and one pass over a block.

A block has the pending token and then masks, at the positions that follow the committed text. Its
places attend to the text before the pending token, and to each other. The same functions draft and
train: drafting has the text in a cache, training in the place of tokens that were fed before.

All functions take ``Net`` first, and ``params`` is always the pair ``ModelParams``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import cache as kv
from specjax.bound import Bound
from specjax.drafters.heads import _block_corrections as corrections
from specjax.drafters.heads import _block_layers as layers
from specjax.drafters.heads._block_layers import BlockShape
from specjax.drafters.heads._family import Ends
from specjax.drafters.heads._network import embed_own
from specjax.models.attention import past, rope_angle
from specjax.models.logits import in_float32
from specjax.models.short_blocks import matmul
from specjax.tree import Layout
from specjax.types import ModelParams, Params

# Parameters that are not in the module.
_OUTSIDE = ("mask", "markov", "gru", "prefix", "confidence", "embed", "head")


class Net(NamedTuple):
    """The static facts."""

    shape: BlockShape
    ends: Ends
    dtype: Any  # of parameters, activations and cache
    ids: np.ndarray | None = None  # i32[V_d] the token of each logit; None: all tokens


def init_cache(net: Net, batch: int, slots: int) -> kv.KVCache:
    """An empty cache of the committed text."""
    config = net.shape.config
    sizes = config.num_layers, batch, config.num_kv_heads, slots, config.head_dim
    return kv.zeros(*sizes, net.dtype, config.windows)


def read(
    net: Net, params: ModelParams, taps: tuple[jax.Array, ...], positions: jax.Array
) -> kv.KVBlock:
    """The keys and values of T tokens of the text, from their taps [B,T,D] each.

    ``positions`` i32[B,T].
    """
    angle = rope_angle(net.shape.config, positions)
    stacked = jnp.stack(taps, -2).astype(_at_least(net, params))
    k, v = _merge(net, params).read(stacked, angle)
    return kv.KVBlock(k, v, v[-1][..., 0, 0].astype(jnp.float32))


def run(
    net: Net,
    params: ModelParams,
    pending: jax.Array,
    tokens: int,
    cache: kv.KVCache,
    layout: Layout,
    text: kv.KVBlock | None = None,
) -> jax.Array:
    """[B,P,K,D]: what predicts each of K tokens after each of the tokens ``pending`` i32[B,P].

    ``layout`` is of the places of all P blocks, one after the other; with ``text`` they follow it.
    """
    shape, dtype = net.shape, _at_least(net, params)
    (batch, blocks), fed = pending.shape, shape.fed(tokens)
    first = embed(net, params, pending)[:, :, None].astype(dtype)
    if shape.mask_id is None:
        mask = params.draft["mask"]
    else:
        mask = embed(net, params, jnp.asarray(shape.mask_id))
    masks = jnp.broadcast_to(mask.astype(dtype), (batch, blocks, fed - 1, first.shape[-1]))
    x = jnp.concatenate([first, masks], 2).reshape(batch, blocks * fed, -1)
    view = past(cache, blocks * fed, layout)
    hidden = _merge(net, params)(x, rope_angle(shape.config, view.positions), view, cache, text)
    hidden = hidden.reshape(batch, blocks, fed, -1)
    return hidden if shape.anchor else hidden[:, :, 1:]


def inside(net: Net, tokens: int) -> jax.Array:
    """bool[F,F]: which of its places each place of a block attends to."""
    size = net.shape.fed(tokens)
    every = jnp.ones((size, size), bool)
    return jnp.tril(every) if net.shape.causal else every


def draft(
    net: Net, params: ModelParams, pending: jax.Array, tokens: int, cache: kv.KVCache
) -> jax.Array:
    """[B,K,D]: what predicts each of K tokens after ``pending`` i32[B] and the cached text."""
    size, batch = net.shape.fed(tokens), len(pending)
    layout = Layout(
        jnp.broadcast_to(inside(net, tokens), (batch, size, size)),
        jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size)),
    )
    return run(net, params, pending[:, None], tokens, cache, layout)[:, 0]


def embed(net: Net, params: ModelParams, tokens: jax.Array) -> jax.Array:
    """i32[...] -> [...,D]: its own embeddings, or the target's."""
    if "embed" in params.draft:
        return embed_own(params, tokens)
    return net.ends.embed(params.target, tokens)


def logits(net: Net, params: ModelParams, hidden: jax.Array) -> jax.Array:
    """[...,D] -> f[...,V_d], in float32 at least, without a correction."""
    if net.shape.head is not None:
        return in_float32(matmul(hidden, params.draft["head"]["kernel"]))
    return in_float32(net.ends.unembed(params.target, hidden))


def correct(
    net: Net, params: ModelParams, state: jax.Array, given: corrections.Given
) -> corrections.Corrected:
    """One depth of the draft, see ``_block_corrections.step``."""
    return corrections.step(net.shape, Bound(embed, net), params, state, given)


def no_state(net: Net, params: ModelParams, *lead: int) -> jax.Array:
    """[...,S]: the state of a correction before the first token."""
    # A correction without a state carries one number that it does not read.
    width = max(corrections.state_width(net.shape), 1)
    return jnp.zeros((*lead, width), _at_least(net, params))


def start(shape: BlockShape, target_params: Params, key: jax.Array) -> Params:
    """New parameters; none of them is the target's."""
    del target_params
    keys = jax.random.split(key, 3)
    params = layers.new(shape, keys[0]) | corrections.new(shape, keys[1])
    if shape.mask_id is None:
        width = shape.config.hidden_size
        params["mask"] = 0.02 * jax.random.normal(keys[2], (width,), jnp.float32)
    return params


def _merge(net: Net, params: ModelParams) -> layers.BlockNet:
    """The module with these parameters (inside a traced function, free at run time)."""
    graph, state = layers.abstract(net.shape, jnp.dtype(_at_least(net, params)))
    # A copy: tracers must not be written into the cached state.
    state = jax.tree.map(lambda x: x, state)
    own = {key: value for key, value in params.draft.items() if key not in _OUTSIDE}
    nnx.replace_by_pure_dict(state, own)
    return nnx.merge(graph, state)


def _at_least(net: Net, params: ModelParams) -> Any:
    """The dtype, or float64 for parameters of float64 (exactness tests)."""
    own = params.draft["hidden_norm"]["scale"].dtype
    return own if own == jnp.float64 else net.dtype
