"""The decoder, and T5 with its encoder, as the pure functions of ``types.LM``.

Flax modules are split and merged in ``modules``.
Parameters are a plain nested dict: dispatching 288 leaves then takes a fraction of a millisecond.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import tree
from specjax.bound import Bound
from specjax.errors import UserError
from specjax.models import recurrent as recurrent_layers
from specjax.models.layers import Module
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.models.transformer import Transformer
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM, Encoder, Inside, Output, Sublayers

DECODER, WITH_ENCODER = Module(Transformer), Module(T5)
_new = jax.jit(Module.new, static_argnums=(0, 1, 3))


def _kind(config: TransformerConfig) -> Module:
    return WITH_ENCODER if isinstance(config, T5Config) else DECODER


def abstract_params(config: TransformerConfig, dtype=jnp.float32) -> dict:
    """The parameters' shapes and dtypes: a plain dict of ``jax.ShapeDtypeStruct``, no arrays."""
    return _kind(config).leaves(config, dtype)


def init_params(config: TransformerConfig, key: jax.Array, dtype=jnp.float32) -> dict:
    """Random parameters (normal, standard deviation 0.02) as a plain dict."""
    return _new(_kind(config), config, key, jnp.dtype(dtype))


def merge(config: TransformerConfig, params: dict, dtype=jnp.float32) -> Any:
    """The ``Transformer`` or ``T5`` with these parameters; see ``Module.merge``."""
    return _kind(config).merge(config, params, dtype)


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
        part: the sublayers that are computed (see ``Inside.part``); None: all.

    Raises UserError for taps or sublayers that are no layers, and without a decoder's start token.
    """
    dtype = jnp.dtype(dtype)
    _check(config, taps, part)
    static = _Static(config, dtype, taps, remat, part)
    extended = Bound(_extended, static)

    def apply(params, tokens, cache, layout=None, block=None):
        return extended((params, None), tokens, cache, layout, block)

    model = LM(
        Bound(_init_cache, config, dtype),
        apply,
        kv.commit if part is None else _no_commit,
        config.vocab_size,
        name=name,
        width=config.hidden_size,
        embed=Bound(_call, "embedded", config, dtype),
        unembed=Bound(_call, "logits", config, dtype),
        layers=config.num_layers,
        tapping=lambda layers: from_config(config, dtype, tuple(layers), name, remat, part).apply,
        inside=Inside(last_norm=Bound(_call, "norm", config, dtype)),
    )
    if isinstance(config, T5Config):
        if part is not None:
            raise UserError(f"{name} has an encoder, and no parts; take a decoder for {part}")
        return model._replace(encoder=Encoder(_start_of(config), Bound(_read, static), config))
    queries = Bound(_call, "queries", config, dtype)  # of a whole model whose layers have them
    return model._replace(
        max_positions=config.longest_text,
        window=min((size for size in config.windows if size is not None), default=None),
        inside=model.inside._replace(
            part=lambda part: from_config(config, dtype, taps, name, remat, part),
            extended=extended,
            decoder=config,
            some_logits=Bound(_call, "some_logits", config, dtype),
            queries=queries if part is None and config.recurrent is None else None,
            above=Bound(_above, static) if part is None else None,
        ),
    )


class _Static(NamedTuple):
    """What is static in the functions of a model: the arguments of ``from_config``."""

    config: TransformerConfig
    dtype: np.dtype
    taps: tuple[int, ...]
    remat: bool
    part: Sublayers | None

    def module(self, params: dict) -> Any:
        """The module with these parameters."""
        return merge(self.config, params, self.dtype)


def _init_cache(config: TransformerConfig, dtype, batch: int, slots: int) -> Any:
    heads, width = config.num_kv_heads, config.head_dim
    recurrent = tuple(map(config.is_recurrent, range(config.num_layers)))
    if any(recurrent):
        windows = [config.window(i) for i, own in enumerate(recurrent) if not own]
        attention = kv.zeros(len(windows), batch, heads, slots, width, dtype, tuple(windows))
        return kv.MixedCache(attention, recurrent_layers.empty(config, dtype, batch), recurrent)
    empty = kv.zeros(config.num_layers, batch, heads, slots, width, dtype, config.windows)
    source = jnp.zeros_like(empty.length) if isinstance(config, T5Config) else None
    return empty.replace(source=source)


def _call(part: str, config: TransformerConfig, dtype: np.dtype, params: dict, *values: Any) -> Any:
    """The result of a method or a part of the module, by its name."""
    return getattr(merge(config, params, dtype), part)(*values)


def _start_of(config: T5Config) -> int:
    """The token with which the decoder begins. Raises UserError if there is none."""
    start = config.start_token_id
    if start is None or start >= config.vocab_size:
        raise UserError(
            f"decoder_start_token_id is {'missing' if start is None else start}; the decoder of an "
            f"encoder-decoder model begins with a token of 0..{config.vocab_size - 1} (T5: that of "
            "pad_token_id)"
        )
    return start


def _read(static: _Static, params, tokens: jax.Array, count: jax.Array, cache: kv.KVCache):
    """``Encoder.read``: the keys and values of the source become the first slots of the cache."""
    memory, block = static.module(params).read(tokens, count, static.remat)
    filled: Any = kv.commit(cache, block, count)
    logits = jnp.zeros((tokens.shape[0], 0, static.config.vocab_size))
    return Output(logits, memory), filled.replace(source=jnp.asarray(count, jnp.int32))


def _extended(static: _Static, pair, tokens: jax.Array, cache, layout=None, block=None):
    """``Inside.extended``, and without rows ``LM.apply``."""
    (params, rows), part = pair, static.part
    module = static.module(params)
    cache = cache if part is None else kv.select(cache, part.attention)
    settings = (static.taps, static.remat, part)
    hidden, tapped, new = module(tokens, cache, layout, block, *settings, rows=rows)
    return Output(module.logits(hidden), hidden, tapped), new


def _above(static: _Static, layers: tuple[int, ...]) -> Callable[..., tuple[Output, Any]]:
    """``Inside.above``; the model's taps for no layers."""
    return Bound(_go_on, static, tuple(layers) or static.taps)


def _go_on(
    static: _Static, taps: tuple[int, ...], pair, tokens: jax.Array, cache, layout=None
) -> tuple[Output, Any]:
    """``LM.apply`` from the output of the first layers, which some tokens have passed already.

    ``pair``: parameters and ``LowerLayers``. Raises UserError for taps below these layers' output.
    """
    params, known = pair
    count, size, done = known.count, tokens.shape[1], known.hidden.shape[1]
    if any(tap < count - 1 for tap in taps):
        raise UserError(
            f"taps are {taps}, and the pass goes on from the output of layer {count - 1}; tap "
            "layers from this one on, or compute the whole pass"
        )
    module = static.module(params)
    first, rest = tuple(range(count)), tuple(range(count, static.config.num_layers))
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
    block = kv.block_of(kv.layers_of(below) + kv.layers_of(above), above.output)
    return Output(module.logits(hidden), hidden, tapped), block


def _check(config: TransformerConfig, taps: tuple[int, ...], part: Sublayers | None) -> None:
    """Raises UserError for layers and sublayers that the model does not have."""
    config.check_taps(taps)
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
