"""Views of some fixed tokens and of the most recent ones, which are a ring.

Sources: StreamingLLM, Xiao et al. 2023 (2309.17453), for the first tokens; SnapKV, Li et al. 2024
(2404.14469), for those that the prompt attends to; MagicDec, Chen et al. 2024 (2408.11049), for
drafting with both.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax import tree
from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache, Queries, newest
from specjax.errors import UserError
from specjax.models.layers import capped
from specjax.sparse_views import view
from specjax.sparse_views.view import View
from specjax.types import LM, Array, Context, Params


class Ring(NamedTuple):
    """``fixed`` slots, then a ring of ``window`` slots.

    The first ``fixed`` + ``window`` tokens of a text are in their order, so nothing is missing
    until the buffer is full. Later tokens replace the oldest of the ring.
    """

    fixed: int
    window: int

    @property
    def slots(self) -> int:
        return self.fixed + self.window

    def slot(self, position: Array, end: Array) -> Array:
        """The slot of a token; ``slots`` for one that a token before ``end`` replaces."""
        place = self.fixed + (position - self.fixed) % self.window
        place = jnp.where(position < end - self.window, self.slots, place)
        return jnp.where(position < self.fixed, position, place)

    def positions(self, length: Array) -> Array:
        """i32[B,slots]: the token in each slot after texts of ``length`` i32[B] tokens."""
        ring = newest(length - self.fixed, self.window) + self.fixed
        first = jnp.broadcast_to(jnp.arange(self.fixed), (len(length), self.fixed))
        return jnp.concatenate([first, ring], 1).astype(jnp.int32)


def _check_room(named: str, budget: int, taken: int, what: str) -> None:
    least = taken + 1
    if budget < least:
        raise UserError(f"{named}: there is no room for {what}; give a budget of at least {least}")


def streaming(model: LM, *, budget: int, sinks: int, most: int) -> View:
    """The first ``sinks`` tokens and the ``budget`` - ``sinks`` most recent ones.

    ``most``: tokens that a round may add to the text. Raises UserError for a budget without room
    for a recent token, and for a model without keys and values.
    """
    view.check("streaming", model)
    named = f"budget is {budget} and sinks is {sinks}"
    _check_room(named, budget, sinks, "the most recent tokens")
    ring = Ring(sinks, budget - sinks)

    return View("streaming", ring.slots, Bound(_gathered, ring), Bound(_read, ring, most))


def _gathered(ring: Ring, params: Params, context: Context) -> KVCache:
    cache = context.cache
    at = ring.positions(cache.length)[:, None]
    return view.gathered(cache, [at] * len(view.full_layers(cache)))


def snapkv(model: LM, *, budget: int, window: int, queries: int, pool: int, most: int) -> View:
    """The most recent ``window`` tokens, and those of the prompt that its end attends to most.

    The last ``queries`` tokens before the pending one ask. Their attention, with scores divided by
    the square root of the head's width as in the model (MagicDec's published code leaves this out),
    is summed over them, averaged over the query heads of a key head and over ``pool`` neighbours.
    Each key head keeps the ``budget`` - ``window`` tokens of the largest mass. They are chosen
    once, when the prompt has been read; a prompt of up to ``budget`` tokens is kept whole. ``most``
    as in ``streaming``.

    Raises UserError for a budget without room for a chosen token, and for a model without keys and
    values or with sliding windows.
    """
    view.check("snapkv", model, windows=False)
    _check_room(f"budget is {budget} and window is {window}", budget, window, "chosen tokens")
    if pool % 2 == 0:
        raise UserError(f"pool is {pool}; it must be odd, so that it is centred")
    ring = Ring(budget - window, window)
    init = Bound(_select, model, ring, queries, pool)
    return View("snapkv", ring.slots, init, Bound(_read, ring, most), history=True)


def _read(
    ring: Ring, most: int, params: Params, context: Context, kept: KVCache
) -> tuple[KVCache, KVCache]:
    """``View.read``."""
    kept = view.caught_up(kept, context.cache, most, ring.slot)
    return view.beside(context.cache, kept, jnp.minimum(kept.length, ring.slots)), kept


def _select(
    model: LM, ring: Ring, queries: int, pool: int, params: Params, context: Context
) -> KVCache:
    """``View.init`` of SnapKV; ``queries`` and ``pool`` as in ``snapkv``."""
    cache, layers = context.cache, view.full_layers(context.cache)
    plain = ring.positions(cache.length)[:, None]
    if cache.k[0].shape[2] <= ring.slots:
        # No text is longer than the view.
        return view.gathered(cache, [plain] * len(layers))
    first = jnp.maximum(cache.length - queries, 0)
    place = first[:, None] + jnp.arange(queries)
    tokens = jnp.take_along_axis(context.tokens, place, 1, mode="clip")
    asked = model.inside.queries(params, tokens, cache.replace(length=first))  # type: ignore[misc]
    before, full = cache.length - ring.window, cache.length >= ring.slots

    def positions(layer: int) -> Array:
        mass = attention_mass(asked[layer], cache.k[layer], first, cache.length)
        chosen = most_attended(mass, before, pool, ring.fixed)
        fixed = jnp.where(full[:, None, None], chosen, plain[..., : ring.fixed])
        rest = jnp.broadcast_to(plain[..., ring.fixed :], (*fixed.shape[:2], ring.window))
        return jnp.concatenate([fixed, rest], 2)

    return view.gathered(cache, [positions(layer) for layer in layers])


def attention_mass(asked: Queries, keys: Array, first: Array, length: Array) -> Array:
    """f32[B,H,S]: the attention that T tokens pay to each cached one.

    The T tokens are those at the positions from ``first`` i32[B] to ``length`` - 1; their own keys
    are in ``keys`` [B,H,S,D]. It is summed over the tokens and averaged over the query heads of a
    key head.
    """
    batch, heads, slots, width = keys.shape
    size = asked.q.shape[1]
    query = asked.q.reshape(batch, size, heads, -1, width)
    scores = jnp.einsum("bthgd,bhsd->bhgts", query, keys.astype(query.dtype))
    scores = capped(scores, asked.softcap)
    own = (first[:, None] + jnp.arange(size))[:, None, None, :, None]
    scores = jnp.where(jnp.arange(slots) <= own, scores, -jnp.inf)
    weights = jnp.where(own < length[:, None, None, None, None], jax.nn.softmax(scores, -1), 0)
    return weights.sum(3).mean(2)


def most_attended(mass: Array, before: Array, pool: int, count: int) -> Array:
    """i32[B,H,count]: the tokens before ``before`` i32[B] with the largest mean of neighbours.

    ``mass`` f32[B,H,S]. Tokens from ``before`` on have mass 0, as has what is beyond the ends.
    """
    inside = jnp.arange(mass.shape[2]) < before[:, None, None]
    padded = jnp.pad(jnp.where(inside, mass, 0), ((0, 0), (0, 0), (pool // 2, pool // 2)))
    # The sum has the order of the mean.
    pooled = sum(padded[..., shift : shift + mass.shape[2]] for shift in range(pool))
    return jax.lax.top_k(jnp.where(inside, pooled, -jnp.inf), count)[1].astype(jnp.int32)


# A model with a streaming cache: the first tokens of the text and the most recent ones.
#
# Source: StreamingLLM, Xiao et al. 2023 (2309.17453). There positions are counted inside the cache;
# here keys and new tokens have their true positions, so the model needs positions for the whole
# text.


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
    named = f"the budget of {model.name} is {budget} and its sinks are {sinks}"
    _check_room(named, budget, sinks, "the most recent tokens")
    ring = Ring(sinks, budget - sinks)

    def init_cache(batch: int, slots: int) -> KVCache:
        cache = model.init_cache(batch, min(slots, ring.slots))
        return cache.replace(held=jnp.zeros((batch,), jnp.int32))

    return model._replace(
        init_cache=init_cache,
        commit=Bound(_commit, ring),
        name=f"{model.name} with a streaming cache",
        inside=model.inside._replace(part=None, queries=None),
    )


def _commit(
    ring: Ring, cache: KVCache, block: KVBlock, count: Array, path: Array | None = None
) -> KVCache:
    """``LM.commit``."""
    kept, inside = tree.accepted(block, count, path)
    start = kv.write_after(cache.length, kept.output)[:, None]
    slot = ring.slot(start + jnp.arange(inside.shape[1]), start + count[:, None])
    slot = jnp.where(inside, slot, cache.k[0].shape[2])

    def put(buffers: tuple, new: tuple) -> tuple:
        pairs = zip(buffers, new, strict=True)
        return tuple(kv.write_at(x, y.swapaxes(1, 2).astype(x.dtype), slot) for x, y in pairs)

    length = cache.length + count
    held = jnp.minimum(length, ring.slots)
    return cache.replace(k=put(cache.k, kept.k), v=put(cache.v, kept.v), length=length, held=held)
