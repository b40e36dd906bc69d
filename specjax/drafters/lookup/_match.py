"""The longest common suffixes of a text and the prefixes of a store, by comparing, on the device.

An occurrence is named by its end: the slot where its continuation begins. Comparing costs
O(longest * slots) and is one fused loop over memory. It needs no state, so no state has to be
restored when a draft is rejected.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.types import Array


def runs(store: Array, tokens: Array, length: Array, longest: int) -> Array:
    """How many tokens before each slot of ``store`` equal the last tokens of a text.

    Args:
        store: i32[n]; negative entries are separators and equal no token.
        tokens: i32[S], the text; entries beyond ``length`` are not read.
        length: i32[].
        longest: the largest count.

    Returns:
        i32[n]: entry ``end`` is the length of the longest common suffix of store[:end] and
        tokens[:length], at most ``longest``.
    """
    end = jnp.arange(store.shape[0])
    matched, run = jnp.ones(end.shape, bool), jnp.zeros(end.shape, jnp.int32)
    for back in range(1, longest + 1):
        # behind[end] = store[end - back]
        behind = jnp.roll(store, back)
        matched &= (
            (end >= back) & (behind == tokens[length - back]) & (behind >= 0) & (length >= back)
        )
        run += matched
    return run


def own_runs(tokens: Array, length: Array, longest: int) -> Array:
    """``runs`` of a text in itself, i32[S], at the places where at least one token follows.

    The end of the text is not an occurrence of itself: there, and beyond it, entries are 0.
    """
    return jnp.where(jnp.arange(tokens.shape[0]) < length, runs(tokens, tokens, length, longest), 0)


def best(run: Array, count: int, longest: int) -> tuple[Array, Array]:
    """The ``count`` longest runs, the latest first among equals.

    Returns:
        The ends and the runs, i32[count] each; a run of 0 is no match.
    """
    size = run.shape[0]
    # Distinct keys, so that the order does not depend on the backend. float32 holds them exactly
    # and is several times faster.
    exact = (longest + 1) * size < 1 << 24
    key = jnp.where(run > 0, run * size + jnp.arange(size), -1)
    top = jax.lax.top_k(key.astype(jnp.float32) if exact else key, min(count, size))[0]
    top = top.astype(jnp.int32)
    top = jnp.pad(top, (0, count - top.shape[0]), constant_values=-1)
    return jnp.where(top < 0, 0, top % size), jnp.where(top < 0, 0, top // size)


def pick(run: Array, match: str) -> tuple[Array, Array]:
    """The "earliest" or "latest" end of the longest runs, i32[], and whether there is one."""
    longest = (run == run.max()) & (run > 0)
    if match == "earliest":
        return jnp.argmax(longest), longest.any()
    return run.shape[0] - 1 - jnp.argmax(longest[::-1]), longest.any()


def follow(store: Array, places: Array, depth: int, length: Array | int | None = None) -> Array:
    """The tokens of ``store`` from ``places`` i32[K] on: i32[K,depth].

    -1 from ``length`` (None: the end of the store) or from a separator on, and everywhere for place
    -1.
    """
    at = places[:, None] + jnp.arange(depth)
    tokens = jnp.take(store, at, mode="fill", fill_value=-1)
    inside = (tokens >= 0) & (places >= 0)[:, None]
    if length is not None:
        inside &= at < length
    return jnp.where(jnp.cumprod(inside, -1) > 0, tokens, -1)


def own_continuations(
    text: Array, length: Array, sizes: Sizes, samples: int, depth: int
) -> tuple[Array, Array, Array]:
    """What followed earlier occurrences of the ends of a text in itself.

    The continuations i32[K,depth], their places and the lengths of their matches, i32[K] each: the
    longest first, the latest first among equals; a length of 0 is no match.
    """
    run = own_runs(text, length, sizes.most)
    ends, runs = best(jnp.where(run >= sizes.least, run, 0), samples, sizes.most)
    return follow(text, jnp.where(runs > 0, ends, -1), depth, length), ends, runs


# Looks up phrases in a datastore on the device: binary search in its suffix array.
#
# One row; callers vmap. The store (``specjax.data.datastore``) is a parameter: tokens i32[n] with
# -1 after every document, and ``order`` i32[n].


class Sizes(NamedTuple):
    """The lengths of phrases that are looked up. Static."""

    most: int
    least: int
    reach: int  # of the store


class Match(NamedTuple):
    """The occurrences of a phrase: they begin at the places ``order[low:high]``. i32[] each."""

    low: Array
    high: Array
    size: Array  # tokens of the phrase; 0: no match


def last_tokens(tokens: Array, length: Array, count: int) -> Array:
    """The last ``count`` of the ``length`` i32[] tokens of a text, i32[count]; -1 before it."""
    place = length - count + jnp.arange(count)
    return jnp.where(place >= 0, jnp.take(tokens, jnp.maximum(place, 0), mode="clip"), -1)


def find(tokens: Array, order: Array, pattern: Array, reach: int) -> tuple[Array, Array]:
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


def continuing(tokens: Array, order: Array, low: Array, high: Array) -> Array:
    """Whether a token follows at least one of the occurrences in ``order[low:high]``, bool[M].

    Entry m - 1 is for a phrase of m tokens (``find``). No token follows at a document's end.
    """
    # The end of a document sorts before every token: if a token follows any occurrence, it
    # follows the last one.
    last = jnp.take(order, jnp.maximum(high - 1, 0), mode="clip")
    after = jnp.take(tokens, last + jnp.arange(1, high.shape[0] + 1), mode="fill", fill_value=-1)
    return (high > low) & (after >= 0)


def longest_match(store: dict[str, Array], text: Array, length: Array, sizes: Sizes) -> Match:
    """The longest end of ``text`` i32[S] that a token follows in the store.

    Without a match the size is 0, and ``low`` and ``high`` are those of one token.
    """
    (most, least, reach), tokens, order = sizes, store["tokens"], store["order"]
    low, high = find(tokens, order, last_tokens(text, length, most), reach)
    count = jnp.arange(1, most + 1)
    size = jnp.max(jnp.where(continuing(tokens, order, low, high) & (count >= least), count, 0))
    at = jnp.maximum(size - 1, 0)
    return Match(low[at], high[at], size)


def sample(order: Array, low: Array, high: Array, count: int) -> Array:
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


def stored_continuations(
    store: dict[str, Array], text: Array, length: Array, sizes: Sizes, samples: int, depth: int
) -> tuple[Array, Array, Match]:
    """What follows the longest match in a store, at places of ``sample``.

    The continuations i32[K,depth], which of them exist bool[K], and the match.
    """
    match = longest_match(store, text, length, sizes)
    places = sample(store["order"], match.low, match.high, samples)
    real = (places >= 0) & (match.size > 0)
    return follow(store["tokens"], jnp.where(real, places + match.size, -1), depth), real, match
