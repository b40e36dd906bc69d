"""What all sparse views share: buffers of a constant size beside the target's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.cache import KVCache, MixedCache, write_at
from specjax.errors import UserError
from specjax.types import LM, Array


def unchanged(kept: Any, grown: Array) -> Any:
    """``View.commit`` of a view that counts no rounds."""
    return kept


class View(NamedTuple):
    """A sparse view of the cache of one model, as pure functions; ``params`` are the model's.

    - ``init(params, context) -> kept``: after the model has read the prompt.
    - ``read(params, context, kept) -> (KVCache, kept)``: the view at the beginning of a round, with
      all tokens that were committed since the last one.
    - ``commit(kept, grown bool[B]) -> kept``: after a round, with the rows whose text has grown.
    """

    name: str
    slots: int  # the most tokens that each layer without a sliding window can hold
    init: Callable[..., Any]
    read: Callable[..., tuple[KVCache, Any]]
    commit: Callable[..., Any] = unchanged
    history: bool = False  # whether it depends on earlier rounds too, not on the text alone


def check(name: str, model: LM, windows: bool = True) -> None:
    """Raises UserError unless the cache of ``model`` has keys and values that a view can choose.

    ``windows``: whether some of its layers may have sliding windows.
    """
    cache = jax.eval_shape(lambda: model.init_cache(1, 1))
    if isinstance(cache, MixedCache):
        raise UserError(
            f"the view {name} chooses among keys and values, and recurrent layers of {model.name} "
            "have a state instead; take a decoder without recurrent layers"
        )
    if not isinstance(cache, KVCache) or model.inside.queries is None:
        raise UserError(
            f"the view {name} chooses among keys and values, and {model.name} has none; take a "
            "decoder of specjax.models"
        )
    if not full_layers(cache):
        raise UserError(
            f"all layers of {model.name} have a sliding window, so the view {name} can leave out "
            "nothing; take a model with layers that read the whole text"
        )
    if not windows and any(cache.windows):
        raise UserError(
            f"the view {name} reads the prompt's last tokens again, and the layers of {model.name} "
            "with a sliding window no longer have what these attended to; take streaming or "
            "retrieval"
        )


def full_layers(cache: KVCache) -> tuple[int, ...]:
    """The layers without a sliding window."""
    windows = cache.windows or (None,) * len(cache.k)
    return tuple(layer for layer, window in enumerate(windows) if window is None)


def take(buffer: Array, positions: Array) -> Array:
    """[B,H,M,D]: the entries of ``buffer`` [B,H,S,D] at ``positions`` i32[B,1 or H,M].

    A position outside of the buffer gives its first or last entry.
    """
    return jnp.take_along_axis(buffer, jnp.clip(positions, 0, buffer.shape[2] - 1)[..., None], 2)


def gathered(cache: KVCache, positions: Sequence[Array]) -> KVCache:
    """Buffers with the entries at ``positions`` i32[B,1 or H,M], one array per full layer.

    They have at most the slots of the cache: a view has no more slots in use than the text has
    tokens.
    """
    layers = full_layers(cache)
    positions = [at[..., : cache.k[layers[0]].shape[2]] for at in positions]
    k, v = (tuple(map(take, [x[i] for i in layers], positions)) for x in (cache.k, cache.v))
    return KVCache(k, v, cache.length)


def beside(cache: KVCache, kept: KVCache, held: Array) -> KVCache:
    """The cache, with the first ``held`` i32[B] slots of ``kept`` in the place of full layers."""
    k, v = list(cache.k), list(cache.v)
    for own, layer in enumerate(full_layers(cache)):
        k[layer], v[layer] = kept.k[own], kept.v[own]
    return cache.replace(k=tuple(k), v=tuple(v), held=held)


def caught_up(kept: KVCache, cache: KVCache, most: int, slot: Callable[..., Array]) -> KVCache:
    """``kept`` with the tokens of the cache from ``kept.length`` on, ``most`` at a time.

    ``slot(position i32[B,M], end i32[B,1])`` gives the slots of tokens when those before ``end``
    are being added; a slot outside of the buffers is not written.
    """

    def lacking(kept: KVCache) -> Array:
        return (kept.length < cache.length).any()

    def more(kept: KVCache) -> KVCache:
        end = jnp.minimum(kept.length + most, cache.length)
        position = kept.length[:, None] + jnp.arange(most, dtype=jnp.int32)
        to = jnp.where(position < end[:, None], slot(position, end[:, None]), kept.k[0].shape[2])

        def added(buffers: Sequence[Array], whole: Sequence[Array]) -> tuple:
            new = [take(whole[layer], position[:, None]) for layer in full_layers(cache)]
            return tuple(write_at(*each, to) for each in zip(buffers, new, strict=True))

        return kept.replace(k=added(kept.k, cache.k), v=added(kept.v, cache.v), length=end)

    return jax.lax.while_loop(lacking, more, kept)
