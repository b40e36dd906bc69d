"""The decoder as the pure functions of ``types.LM``.

Flax modules are split and merged only here (and in ``drafters/heads/_prefix.py``, for one layer).
Parameters are a plain nested dict: dispatching 288 leaves then takes a fraction of a millisecond.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import cache as kv
from specjax import tree
from specjax.bound import Bound
from specjax.errors import UserError
from specjax.models import t5_lm
from specjax.models.t5_config import T5Config
from specjax.models.transformer import Transformer
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM, LowerLayers, Output, Sublayers


@functools.cache
def _abstract(config: TransformerConfig, dtype) -> tuple[Any, Any]:
    module = nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))
    return nnx.split(module)


def abstract_params(config: TransformerConfig, dtype=jnp.float32) -> dict:
    """The parameters' shapes and dtypes: a plain dict of ``jax.ShapeDtypeStruct``, no arrays."""
    if isinstance(config, T5Config):
        return nnx.to_pure_dict(t5_lm.abstract(config, jnp.dtype(dtype))[1])
    return nnx.to_pure_dict(_abstract(config, jnp.dtype(dtype))[1])


def init_params(config: TransformerConfig, key: jax.Array, dtype=jnp.float32) -> dict:
    """Random parameters (normal, standard deviation 0.02) as a plain dict."""
    if isinstance(config, T5Config):
        return t5_lm.init_params(config, jnp.dtype(dtype), key)
    return _init_params(config, jnp.dtype(dtype), key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_params(config: TransformerConfig, dtype: np.dtype, key: jax.Array) -> dict:
    module = Transformer(config, dtype=dtype, rngs=nnx.Rngs(key))
    return nnx.to_pure_dict(nnx.state(module))


def merge(config: TransformerConfig, params: dict, dtype=jnp.float32) -> Transformer:
    """The module with these parameters (inside a traced function, free at run time)."""
    graph, state = _abstract(config, jnp.dtype(dtype))
    # A copy: replacing in place would write tracers into the cached state.
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


@functools.cache
def from_config(
    config: TransformerConfig,
    dtype=jnp.float32,
    taps: tuple[int, ...] = (),
    name: str = "lm",
    remat: bool = False,
    part: Sublayers | None = None,
) -> LM:
    """The decoder of ``config``, or its T5 model, as an ``LM``.

    Equal arguments give the same object, so no program is compiled twice.

    Args:
        config: the shape of the decoder.
        dtype: of parameters and activations.
        taps: layer numbers; the output hidden states of these layers are in ``Output.taps``.
        name: for messages and results.
        remat: recompute each layer in the backward pass instead of storing its activations.
        part: the sublayers that are computed (see ``LM.part``); None: all.

    Raises UserError for taps or sublayers that are not layers.
    """
    dtype = jnp.dtype(dtype)
    _check_part(config, part)
    config.check_taps(taps)
    if isinstance(config, T5Config):
        if part is not None:
            raise UserError(f"{name} has an encoder, and no parts; take a decoder for {part}")
        return t5_lm.from_config(config, dtype, taps, name, remat)

    extended = Bound(_extended, config, dtype, taps, remat, part)

    def apply(params, tokens, cache, layout=None, block=None):
        return extended((params, None), tokens, cache, layout, block)

    return LM(
        Bound(_init_cache, config, dtype),
        apply,
        kv.commit if part is None else _no_commit,
        config.vocab_size,
        config.longest_text,
        name=name,
        width=config.hidden_size,
        embed=Bound(_embed, config, dtype),
        unembed=Bound(_unembed, config, dtype),
        layers=config.num_layers,
        window=min((size for size in config.windows if size is not None), default=None),
        tapping=lambda layers: from_config(config, dtype, tuple(layers), name, remat, part).apply,
        part=lambda part: from_config(config, dtype, taps, name, remat, part),
        queries=None if part is not None else Bound(_queries, config, dtype),
        last_norm=Bound(_last_norm, config, dtype),
        extended=extended,
        above=None if part is not None else Bound(_above, config, dtype, taps),
        decoder=config,
    )


def _init_cache(config: TransformerConfig, dtype, batch: int, slots: int) -> kv.KVCache:
    heads, width = config.num_kv_heads, config.head_dim
    return kv.zeros(config.num_layers, batch, heads, slots, width, dtype, config.windows)


def _embed(config: TransformerConfig, dtype: np.dtype, params: dict, tokens: jax.Array):
    return merge(config, params, dtype).embedded(tokens)


def _unembed(config: TransformerConfig, dtype: np.dtype, params: dict, hidden: jax.Array):
    return merge(config, params, dtype).logits(hidden)


def _queries(
    config: TransformerConfig, dtype: np.dtype, params: dict, tokens: jax.Array, cache: kv.KVCache
):
    return merge(config, params, dtype).queries(tokens, cache)


def _last_norm(config: TransformerConfig, dtype: np.dtype, params: dict, hidden: jax.Array):
    return merge(config, params, dtype).norm(hidden)


def _extended(config, dtype, taps, remat, part, pair, tokens, cache, layout=None, block=None):
    """``LM.extended``, and without rows ``LM.apply``."""
    params, rows = pair
    module = merge(config, params, dtype)
    cache = cache if part is None else kv.select(cache, part.attention)
    hidden, tapped, own = module(tokens, cache, layout, block, taps, remat, part, rows=rows)
    return Output(module.logits(hidden), hidden, tapped), own


def _above(
    config: TransformerConfig, dtype: np.dtype, own: tuple[int, ...], layers: tuple[int, ...]
) -> Callable[..., tuple[Output, Any]]:
    """``LM.above``; ``own`` are the model's taps."""
    return Bound(_go_on, config, dtype, tuple(layers) or own)


def _go_on(
    config: TransformerConfig,
    dtype: np.dtype,
    taps: tuple[int, ...],
    pair: tuple[dict, LowerLayers],
    tokens: jax.Array,
    cache: kv.KVCache,
    layout: tree.Layout | None = None,
) -> tuple[Output, kv.KVBlock]:
    """``LM.apply`` from the output of the first layers, which some tokens have passed already.

    Raises UserError for taps below these layers' output.
    """
    params, known = pair
    count, size, done = known.count, tokens.shape[1], known.hidden.shape[1]
    if any(tap < count - 1 for tap in taps):
        raise UserError(
            f"taps are {taps}, and the pass goes on from the output of layer {count - 1}; tap "
            "layers from this one on, or compute the whole pass"
        )
    module = merge(config, params, dtype)
    first, rest = tuple(range(count)), tuple(range(count, config.num_layers))
    lower = jax.tree.map(lambda x: x[:, :size], (known.hidden, known.block))
    if size > done:
        later = None if layout is None else layout.replace(visible=layout.visible[:, done:])
        own, part = kv.select(cache, first), Sublayers(first, first)
        more = module(tokens[:, done:], own, later, known.block, (count - 1,), part=part)
        lower = tree.join(lower, (*more[1], more[2]))
    x, below = lower
    own, part = kv.select(cache, rest), Sublayers(rest, rest)
    hidden, tapped, above = module(tokens, own, layout, None, taps, part=part, start=x)
    # The output at a token depends on all that was read for it, in the first layers too.
    block = kv.KVBlock(below.k + above.k, below.v + above.v, above.output)
    return Output(module.logits(hidden), hidden, tapped), block


def _check_part(config: TransformerConfig, part: Sublayers | None) -> None:
    """Raises UserError for sublayers that the model does not have."""
    every = set(range(config.num_layers))
    for kind, layers in zip(("attention", "feed-forward"), part or ((), ()), strict=True):
        if list(layers) != sorted(set(layers)) or not set(layers) <= every:
            raise UserError(
                f"the {kind} part of layers {list(layers)} is asked for; give ascending numbers "
                f"from 0 to {config.num_layers - 1}"
            )


def _no_commit(*_: Any) -> Any:
    raise TypeError("a part of a model reads the whole model's cache and commits nothing")


def forward(model: LM, params: Any, tokens: jax.Array, segments: jax.Array | None = None) -> Output:
    """Scores whole sequences at once, for training and tests: tokens i32[B,T] -> ``Output``.

    With ``segments`` i32[B,T], a row has several documents in sequence; attention and positions
    stay inside each document.

    Of a model with an encoder, each row is a source, the start token, and what was written. At the
    places of the source ``hidden`` and the taps are the encoder's output, as in ``prompt.feed``,
    and the logits have no meaning. Raises UserError for segments.
    """
    if model.encoder is not None:
        if segments is not None:
            raise UserError(f"{model.name} has an encoder: give one document per row")
        return _forward_with_source(model, params, tokens)
    layout = None if segments is None else tree.segments(segments)
    return model.apply(params, tokens, model.init_cache(tokens.shape[0], 0), layout)[0]


def _forward_with_source(model: LM, params: Any, tokens: jax.Array) -> Output:
    """``forward`` of a model with an encoder."""
    assert model.encoder is not None
    (batch, size), place = tokens.shape, jnp.arange(tokens.shape[1])
    count = jnp.argmax(tokens == model.encoder.start, axis=1).astype(jnp.int32)
    read, cache = model.encoder.read(params, tokens, count, model.init_cache(batch, size))
    visible = (place <= place[:, None]) & (place >= count[:, None, None])
    out, _ = model.apply(params, tokens, cache, tree.Layout(visible, place - count[:, None]))
    source = (place < count[:, None])[..., None]
    hidden, taps = jax.tree.map(
        lambda own: jnp.where(source, read.hidden.astype(own.dtype), own), (out.hidden, out.taps)
    )
    return Output(out.logits, hidden, taps)


def layers_left_out(
    config: TransformerConfig,
    params: dict,
    tokens: jax.Array,
    kept: jax.Array,
    segments: jax.Array | None = None,
    remat: bool = False,
) -> tuple[jax.Array, ...]:
    """The outputs [B,T,E] of all layers, of which each row computes some: for training.

    tokens i32[B,T]; kept bool[B,L]: the other layers pass their input on. ``segments`` as in
    ``forward``, ``remat`` as in ``from_config``. Computed in the dtype of ``params``.
    """
    dtype = params["embed"]["embedding"].dtype
    layout = None if segments is None else tree.segments(segments)
    every = tuple(range(config.num_layers))
    cache = from_config(config, dtype).init_cache(tokens.shape[0], 0)
    return merge(config, params, dtype)(tokens, cache, layout, None, every, remat, kept=kept)[1]
