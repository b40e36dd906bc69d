"""Looks up phrases in a datastore on the device: binary search in its suffix array.

One row; callers vmap. The store (``specjax.data.datastore``) is a parameter: tokens i32[n] with -1
after every document, and ``order`` i32[n].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Match(NamedTuple):
    """The occurrences of a phrase: they begin at the places ``order[low:high]``. i32[] each."""

    low: jax.Array
    high: jax.Array
    size: jax.Array  # tokens of the phrase; 0: no match


def last_tokens(tokens: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """The last ``count`` of the ``length`` i32[] tokens of a text, i32[count]; -1 before it."""
    place = length - count + jnp.arange(count)
    return jnp.where(place >= 0, jnp.take(tokens, jnp.maximum(place, 0), mode="clip"), -1)


def find(
    tokens: jax.Array, order: jax.Array, pattern: jax.Array, reach: int
) -> tuple[jax.Array, jax.Array]:
    """The occurrences of the ends of a text in the store.

    About 2 log2(n) steps of M gathers of M tokens.

    Args:
        tokens, order: the store, i32[n] each.
        pattern: i32[M] the last M tokens of a text, the newest last; -1 before its first token.
        reach: how many tokens ``order`` is sorted by.

    Returns:
        low, high i32[M]: the last m tokens occur exactly at the places ``order[low:high]`` of entry
        m - 1. There is no match (low = high) for more than ``reach`` tokens, and for phrases that
        contain a -1.
    """
    size, longest = tokens.shape[0], pattern.shape[0]
    count = jnp.arange(1, longest + 1)
    # [M,M]: row m - 1 is the phrase of m tokens, its first token first
    inside = jnp.arange(longest) < count[:, None]
    phrase = jnp.take(pattern, (longest - count)[:, None] + jnp.arange(longest), mode="clip")
    real = jnp.all((phrase >= 0) | ~inside, -1) & (count <= reach)

    def before(where):
        """[2,M]: whether the suffix at order[where] is less than, or at most, the phrase."""
        start = jnp.take(order, where, mode="clip")[..., None] + jnp.arange(longest)
        text = jnp.take(tokens, start, mode="fill", fill_value=-1)
        differs = (text != phrase) & inside
        at = jnp.argmax(differs, -1)[..., None]
        wanted = jnp.take_along_axis(jnp.broadcast_to(phrase, text.shape), at, -1)
        less = jnp.take_along_axis(text, at, -1) < wanted
        return jnp.where(differs.any(-1), less[..., 0], jnp.array([[False], [True]]))

    def halve(_, bounds):
        # [2,M]: the first row searches for the beginning of the range, the second for its end.
        low, high = bounds
        middle = low + (high - low) // 2
        right = before(middle) & (low < high)
        return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

    start = (jnp.zeros((2, longest), jnp.int32), jnp.full((2, longest), size, jnp.int32))
    bounds, _ = jax.lax.fori_loop(0, math.ceil(math.log2(size + 1)), halve, start)
    return jnp.where(real, bounds[0], 0), jnp.where(real, bounds[1], 0)


def continuing(tokens: jax.Array, order: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Whether a token follows at least one of the occurrences in ``order[low:high]``, bool[M].

    Entry m - 1 is for a phrase of m tokens (``find``). No token follows at a document's end.
    """
    # The end of a document sorts before every token: if a token follows any occurrence, it
    # follows the last one.
    last = jnp.take(order, jnp.maximum(high - 1, 0), mode="clip")
    after = jnp.take(tokens, last + jnp.arange(1, high.shape[0] + 1), mode="fill", fill_value=-1)
    return (high > low) & (after >= 0)


def longest_match(
    tokens: jax.Array,
    order: jax.Array,
    text: jax.Array,
    length: jax.Array,
    *,
    max_ngram: int,
    min_ngram: int,
    reach: int,
) -> Match:
    """The longest end of ``text`` i32[S] that a token follows in the store.

    Its size is between ``min_ngram`` and ``max_ngram``. Without a match the size is 0, and ``low``
    and ``high`` are those of one token.
    """
    low, high = find(tokens, order, last_tokens(text, length, max_ngram), reach)
    sizes = jnp.arange(1, max_ngram + 1)
    usable = continuing(tokens, order, low, high) & (sizes >= min_ngram)
    size = jnp.max(jnp.where(usable, sizes, 0))
    at = jnp.maximum(size - 1, 0)
    return Match(low[at], high[at], size)


def sample(order: jax.Array, low: jax.Array, high: jax.Array, count: int) -> jax.Array:
    """Places of the range ``order[low:high]``, spread evenly over it: i32[count].

    If the range has fewer than ``count`` places, each is taken once, then -1 follows. Otherwise the
    range is cut into ``count`` equal parts and the middle of each part is taken: neighbours in the
    range have similar continuations. The result depends on the range only.
    """
    size, index = high - low, jnp.arange(count + 1)
    every, rest = size // count, size % count
    # The first place of part i, without products beyond the store's size.
    edge = index * every + index * rest // count
    middle = edge[:-1] + (edge[1:] - edge[:-1]) // 2
    chosen = jnp.where(size < count, index[:-1], middle)
    places = jnp.take(order, low + chosen, mode="clip")
    return jnp.where(chosen < size, places, -1).astype(jnp.int32)


def follow(tokens: jax.Array, places: jax.Array, depth: int) -> jax.Array:
    """The tokens from ``places`` i32[K] to the end of their documents: i32[K,depth].

    -1 after the end of the document, and everywhere for place -1.
    """
    at = places[:, None] + jnp.arange(depth)
    text = jnp.take(tokens, at, mode="fill", fill_value=-1)
    inside = jnp.cumprod((text >= 0) & (places >= 0)[:, None], -1)
    return jnp.where(inside > 0, text, -1)
