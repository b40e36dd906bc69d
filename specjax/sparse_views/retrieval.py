"""A view of the chunks of the text whose mean keys fit the newest query. TriForce's cache.

Source: TriForce, Sun et al. 2024 (2404.11912), section 4.1. Its code computes the scores for models
with as many key heads as query heads; here the queries of a group are averaged. It replaces the
chunks with the lowest scores by new tokens; here these have slots of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.bound import Bound
from specjax.cache import KVCache
from specjax.checks import counts
from specjax.errors import UserError
from specjax.sparse_views import view
from specjax.sparse_views.view import View
from specjax.types import LM, Array, Context, Params


class Kept(struct.PyTreeNode):
    """The chosen chunks, and the tokens after them."""

    cache: KVCache  # of the full layers; ``length`` tokens of the text were added
    # i32[B]: a token after the last complete chunk of the choice is in slot position - shift.
    shift: Array
    age: Array  # i32[B] rounds since the choice


class Settings(NamedTuple):
    """Static settings."""

    model: LM
    chunk: int  # tokens
    chunks: int  # how many are chosen
    refresh: int  # rounds after which they are chosen again
    most: int  # tokens that a round may add to the text

    @property
    def slots(self) -> int:
        # Behind the chunks: those after the last complete one, and the tokens of the rounds.
        return self.chunk * (self.chunks + 1) - 1 + (self.refresh - 1) * self.most


def retrieval(model: LM, *, budget: int, chunk: int, refresh: int, most: int) -> View:
    """The first chunk of the text, the ``budget`` / ``chunk`` - 1 best others, and newer tokens.

    A chunk's score is the product of the pending token's query and the mean of the chunk's keys,
    per layer and key head; the queries of a group are averaged. Chunks are chosen when the prompt
    has been read and again after ``refresh`` rounds. The tokens that are committed after that are
    always in the view; they have further slots, so that a row's view has up to
    ``budget`` + ``chunk`` - 1 + (``refresh`` - 1) * ``most`` tokens. ``most`` as in ``streaming``.

    Raises UserError for a budget that is no multiple of ``chunk``, and for a model without keys and
    values.
    """
    view.check("retrieval", model)
    counts(chunk=chunk, refresh=refresh, budget=budget)
    if budget % chunk:
        raise UserError(f"budget is {budget}; it must be a multiple of chunk, which is {chunk}")
    settings = Settings(model, chunk, budget // chunk, refresh, most)
    init, read = Bound(_init, settings), Bound(_read, settings)
    # With 1 the chunks are chosen in every round, from the text alone.
    return View("retrieval", settings.slots, init, read, _commit, history=refresh > 1)


def _init(settings: Settings, params: Params, context: Context) -> Kept:
    """``View.init``."""
    cache = context.cache
    kept = view.gathered(cache, _choose(settings, params, context))
    return Kept(kept, _shift(settings, cache.length), jnp.zeros_like(cache.length))


def _read(settings: Settings, params: Params, context: Context, kept: Kept) -> tuple[KVCache, Kept]:
    """``View.read``."""
    cache = context.cache
    # Without room for the new tokens: another drafter proposed in some rounds.
    full = cache.length - kept.shift > settings.slots
    kept = _renewed(settings, params, context, kept, full | (kept.age >= settings.refresh))

    def slot(position: Array, end: Array) -> Array:
        return position - kept.shift[:, None]

    own = view.caught_up(kept.cache, cache, settings.most, slot)
    return view.beside(cache, own, cache.length - kept.shift), kept.replace(cache=own)


def _commit(kept: Kept, grown: Array) -> Kept:
    """``View.commit``."""
    return kept.replace(age=kept.age + grown)


def _renewed(settings: Settings, params: Params, context: Context, kept: Kept, rows: Array) -> Kept:
    """``kept`` with new chunks in ``rows`` bool[B]; without such rows nothing is computed."""
    cache, needed = context.cache, rows.any()
    shape = cache.length.shape[0], cache.k[0].shape[1], settings.slots

    def none() -> tuple[Array, ...]:
        return (jnp.zeros(shape, jnp.int32),) * len(view.full_layers(cache))

    # The conditional gives positions only: its results are copied. The buffers are written by a
    # loop of at most one turn. It clears the positions, which keeps the compiler from gathering
    # before the loop, that is in every round.
    chosen = jax.lax.cond(needed, lambda: tuple(_choose(settings, params, context)), none)

    def turn(carry: Any) -> Any:
        _, chosen, old = carry
        new = view.gathered(cache, chosen)
        return jnp.zeros((), bool), none(), tree.where_rows(rows, new, old)

    own = jax.lax.while_loop(lambda carry: carry[0], turn, (needed, chosen, kept.cache))[2]
    shift = jnp.where(rows, _shift(settings, cache.length), kept.shift)
    return Kept(own, shift, jnp.where(rows, 0, kept.age))


def _shift(settings: Settings, length: Array) -> Array:
    """i32[B]: ``Kept.shift`` of a choice after ``length`` i32[B] tokens."""
    complete = length // settings.chunk
    return (complete - jnp.minimum(complete, settings.chunks)) * settings.chunk


def _choose(settings: Settings, params: Params, context: Context) -> list[Array]:
    """i32[B,H,slots] for each full layer: the tokens of the slots. It reads the whole cache."""
    cache, chunk = context.cache, settings.chunk
    queries = settings.model.inside.queries
    assert queries is not None
    asked = queries(params, context.pending[:, None], cache)
    complete = cache.length // chunk
    used = jnp.minimum(complete, settings.chunks)[:, None, None] * chunk
    slot = jnp.arange(settings.slots, dtype=jnp.int32)
    rest = slot + _shift(settings, cache.length)[:, None, None]

    def positions(layer: int) -> Array:
        scores = chunk_scores(asked[layer].q[:, 0], cache.k[layer], chunk)
        best = best_chunks(scores, complete, settings.chunks)
        tokens = (best[..., None] * chunk + jnp.arange(chunk)).reshape(*best.shape[:2], -1)
        tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, settings.slots - tokens.shape[2])))
        return jnp.where(slot < used, tokens, rest).astype(jnp.int32)

    return [positions(layer) for layer in view.full_layers(cache)]


def chunk_scores(query: Array, keys: Array, chunk: int) -> Array:
    """f32[B,H,S // chunk]: queries [B,Q,D], averaged in groups, times the mean keys of chunks."""
    batch, heads, slots, width = keys.shape
    number = slots // chunk
    parts = keys[:, :, : number * chunk].reshape(batch, heads, number, chunk, width)
    means = parts.astype(query.dtype).mean(3)
    group = query.reshape(batch, heads, -1, width).mean(2)
    return jnp.einsum("bhd,bhcd->bhc", group, means)


def best_chunks(scores: Array, complete: Array, count: int) -> Array:
    """i32[B,H,count or fewer]: the first chunk, and the best of the other ``complete`` i32[B]."""
    number = jnp.arange(scores.shape[2])
    scores = jnp.where(number < complete[:, None, None], scores, -jnp.inf)
    scores = jnp.where(number == 0, jnp.inf, scores)
    return jax.lax.top_k(scores, min(count, scores.shape[2]))[1].astype(jnp.int32)
