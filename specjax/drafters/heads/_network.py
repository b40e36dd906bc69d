"""A small decoder over a target's features: the draft network of EAGLE-1, EAGLE-2 and EAGLE-3.

Slot t of its text reads token t + 1 and the feature of token t, at rotary position t, and predicts
token t + 2. Where the target has not computed a feature yet, the network's own output at the slot
before takes its place. So a draft needs no further pass of the target.

This file is the one description for drafting and training; ``_eagle_layers`` has the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import cache as kv
from specjax.bound import Bound
from specjax.drafters.heads import _eagle_layers as layers
from specjax.drafters.heads._eagle_layers import Fed, Shape
from specjax.drafters.heads._family import Ends
from specjax.models.attention import past, rope_angle
from specjax.models.logits import in_float32
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Columns, Layout
from specjax.types import ModelParams, Output, Params

__all__ = ["Fed", "Network", "Parallel", "Shape", "build", "embed_own"]


class Parallel(NamedTuple):
    """What a network needs to draft all tokens in one pass (P-EAGLE)."""

    tokens: int  # K, how many it was trained to draft
    mask_id: int  # the token at places whose token is unknown


class Network(NamedTuple):
    """A draft network as pure functions; ``params`` is always the pair ``ModelParams``.

    ``apply`` and ``commit`` are as in ``types.LM``, with features beside the tokens:
    ``apply(params, tokens i32[B,T], features [B,T,D], cache, layout=None, block=None) ->
    (Fed, block)``.
    """

    name: str
    width: int  # D
    taps: tuple[int, ...]  # layers of the target that it reads; (): ``Output.hidden``
    init_cache: Callable[[int, int], Any]
    # (params, Output) -> [B,T,D]: the target's features as the network reads them.
    read: Callable[[ModelParams, Output], jax.Array]
    apply: Callable[..., tuple[Fed, Any]]
    commit: Callable[..., Any]
    # (params, ``Fed.hidden`` [...,D]) -> f[...,V_d], in float32 at least.
    logits: Callable[[ModelParams, jax.Array], jax.Array]
    # (target_params, key) -> new parameters to start training with.
    start: Callable[[Params, jax.Array], Params]
    # i32[V_d] ascending: the token of each logit; None: all tokens.
    ids: np.ndarray | None = None
    # What config.json must hold about the parameters in addition to their shapes.
    facts: tuple[tuple[str, Any], ...] = ()
    # Modules in sequence (``_further``): ``apply`` then takes the number of one, ``module=``.
    modules: int = 1
    # Slot t reads token t + shift. 0 is an ablation: the token is that of the feature.
    shift: int = 1
    # Whether it drafts all tokens in one pass; ``masked(params)`` [D] is then the feature of masks.
    parallel: Parallel | None = None
    masked: Callable[[ModelParams], jax.Array] | None = None


def build(
    name: str,
    shape: Shape,
    ends: Ends,
    *,
    own_embedding: bool = False,
    vocab_size: int = 0,
    ids: np.ndarray | None = None,
    dtype: Any = jnp.float32,
    facts: tuple[tuple[str, Any], ...] = (),
    parallel: Parallel | None = None,
) -> Network:
    """The network of this shape on a target.

    Args:
        name: of the method.
        shape: of the network.
        ends: what it uses of the target.
        own_embedding: whether the parameters have an embedding; otherwise it is the target's.
        vocab_size: of the target, for new parameters with an embedding.
        ids: i32[V_d] ascending, the tokens that it can draft; None: all.
        dtype: of parameters, activations and cache.
        facts: see ``Network``.
        parallel: see ``Network``.
    """
    dtype, config = jnp.dtype(dtype), shape.config
    embed = embed_own if own_embedding else Bound(embed_by, ends)
    return Network(
        name=name,
        width=config.hidden_size,
        taps=shape.taps,
        init_cache=Bound(init_cache, config.num_layers, config, dtype),
        read=Bound(_read, shape, dtype),
        apply=Bound(_apply, shape, dtype, embed),
        commit=kv.commit,
        logits=Bound(_logits, shape, dtype, ends),
        start=Bound(_start, shape, ends, ids, vocab_size if own_embedding else 0),
        ids=ids,
        facts=facts,
        shift=shape.shift,
        parallel=parallel,
        masked=Bound(_masked, shape, dtype) if shape.parallel else None,
    )


def merge(shape: Shape, params: Params, dtype: Any = jnp.float32) -> Any:
    """The module with these parameters (inside a traced function, free at run time)."""
    graph, state = layers.abstract(shape, jnp.dtype(dtype))
    # A copy: tracers must not be written into the cached state.
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, {key: x for key, x in params.items() if key != "embed"})
    return nnx.merge(graph, state)


def init_cache(layers: int, config: TransformerConfig, dtype: Any, batch: int, slots: int) -> Any:
    """An empty cache of so many layers."""
    return kv.zeros(layers, batch, config.num_kv_heads, slots, config.head_dim, dtype)


def embed_by(ends: Ends, params: ModelParams, tokens: jax.Array) -> jax.Array:
    """i32[...] -> [...,E]: with the target's embedding."""
    return ends.embed(params.target, tokens)


def embed_own(params: ModelParams, tokens: jax.Array) -> jax.Array:
    """i32[...] -> [...,D]: with the embedding that the parameters of the network have."""
    table = params.draft["embed"]["embedding"]
    return table[jnp.clip(tokens, 0, table.shape[0] - 1)]


def _read(shape: Shape, dtype: Any, params: ModelParams, out: Output) -> jax.Array:
    dtype = _at_least(dtype, params)
    if not shape.taps:
        return out.hidden.astype(dtype)
    read = jnp.stack(out.taps, -2).astype(dtype)
    return merge(shape, params.draft, dtype).read(read)


def _masked(shape: Shape, dtype: Any, params: ModelParams) -> jax.Array:
    return merge(shape, params.draft, _at_least(dtype, params)).masked()


def _apply(
    shape: Shape,
    dtype: Any,
    embed: Callable[[ModelParams, jax.Array], jax.Array],
    params: ModelParams,
    tokens: jax.Array,
    features: jax.Array,
    cache: kv.KVCache,
    layout: Layout | Columns | None = None,
    block: kv.KVBlock | None = None,
) -> tuple[Fed, kv.KVBlock]:
    """tokens i32[B,T] and features [B,T,D] -> (``Fed``, keys and values of these slots)."""
    dtype, fed = _at_least(dtype, params), 0 if block is None else block.size
    view = past(cache, tokens.shape[1], layout, fed)
    angle = rope_angle(shape.config, view.positions)
    embedded = embed(params, tokens).astype(dtype)
    module = merge(shape, params.draft, dtype)
    return module(embedded, features.astype(dtype), angle, view, cache, block)


def _logits(
    shape: Shape, dtype: Any, ends: Ends, params: ModelParams, hidden: jax.Array
) -> jax.Array:
    if shape.vocab is None:
        return in_float32(ends.unembed(params.target, hidden))
    module = merge(shape, params.draft, _at_least(dtype, params))
    return in_float32(module.head(hidden))


def _at_least(dtype: Any, params: ModelParams) -> Any:
    """``dtype``, or float64 for parameters of float64 (exactness tests)."""
    own = params.draft["fc"]["kernel"].dtype
    return own if own == jnp.float64 else dtype


def _start(
    shape: Shape,
    ends: Ends,
    ids: np.ndarray | None,
    embedded: int,
    target_params: Params,
    key: jax.Array,
) -> Params:
    """New parameters: random, but a head and an embedding of its own begin as the target's.

    ``embedded`` is the size of the embedding; 0: there is none.
    """
    params = layers.new(shape, key)
    if embedded:
        table = ends.embed(target_params, jnp.arange(embedded))
        params["embed"] = {"embedding": table.astype(params["fc"]["kernel"].dtype)}
    if shape.vocab is not None:
        with jax.default_matmul_precision("highest"):
            head = ends.unembed(target_params, jnp.eye(ends.width))
        head = head.astype(params["fc"]["kernel"].dtype)
        params["head"]["kernel"] = head if ids is None else head[:, jnp.asarray(ids)]
    return params
