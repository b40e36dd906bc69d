"""A model with a streaming cache: the first tokens of the text and the most recent ones.

Source: StreamingLLM, Xiao et al. 2023 (2309.17453). There positions are counted inside the cache;
here keys and new tokens have their true positions, so the model needs positions for the whole text.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax import tree
from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache
from specjax.errors import UserError
from specjax.sparse_views import view
from specjax.sparse_views.ring import Ring
from specjax.types import LM


@functools.cache
def streaming_model(model: LM, *, budget: int, sinks: int) -> LM:
    """``model`` with a cache of ``budget`` tokens: the first ``sinks`` and the most recent ones.

    A token attends to these and to all tokens of its own block, so tokens that are fed together, as
    those of a prompt are, may attend to more. Equal arguments give the same functions.

    Raises UserError for a budget without room for a recent token, and for a model without keys and
    values or with sliding windows.
    """
    view.check("streaming", model)
    if any(jax.eval_shape(lambda: model.init_cache(1, 1)).windows):
        raise UserError(
            f"{model.name} has layers with a sliding window, whose cache is small already; take a "
            "model without sliding windows"
        )
    if budget <= sinks:
        raise UserError(
            f"the budget of {model.name} is {budget} and its sinks are {sinks}: there is no room "
            f"for the most recent tokens; give a budget of at least {sinks + 1}"
        )
    ring = Ring(sinks, budget - sinks)

    def init_cache(batch: int, slots: int) -> KVCache:
        cache = model.init_cache(batch, min(slots, ring.slots))
        return cache.replace(held=jnp.zeros((batch,), jnp.int32))

    return model._replace(
        init_cache=init_cache,
        commit=Bound(_commit, ring),
        name=f"{model.name} with a streaming cache",
        part=None,
        queries=None,
    )


def _commit(
    ring: Ring, cache: KVCache, block: KVBlock, count: jax.Array, path: jax.Array | None = None
) -> KVCache:
    """``LM.commit``."""
    size = block.output.shape[1] if path is None else path.shape[1]
    inside = jnp.arange(size) < count[:, None]
    kept: Any = tree.mask(block, inside) if path is None else tree.take(block, path, inside)
    start = kv.write_after(cache.length, kept.output)[:, None]
    slots = cache.k[0].shape[2]
    slot = ring.slot(start + jnp.arange(size), start + count[:, None])
    slot = jnp.where(inside, slot, slots)

    def put(buffers: tuple, new: tuple) -> tuple:
        pairs = zip(buffers, new, strict=True)
        return tuple(view.put(x, y.swapaxes(1, 2).astype(x.dtype), slot) for x, y in pairs)

    length = cache.length + count
    held = jnp.minimum(length, ring.slots)
    return cache.replace(k=put(cache.k, kept.k), v=put(cache.v, kept.v), length=length, held=held)
