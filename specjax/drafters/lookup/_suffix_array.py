"""Looking a phrase up in a datastore on the device: binary search in its suffix array. One row; callers vmap.

The store (``specjax.datastore``) is a parameter: tokens i32[n] with -1 after every document, and ``order`` i32[n].
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def last_tokens(tokens: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """i32[count]: the end of a text of ``length`` i32[] tokens, the newest last; -1 where it is shorter."""
    place = length - count + jnp.arange(count)
    return jnp.where(place >= 0, jnp.take(tokens, jnp.maximum(place, 0), mode="clip"), -1)


def find(
    tokens: jax.Array, order: jax.Array, pattern: jax.Array, reach: int
) -> tuple[jax.Array, jax.Array]:
    """Where the ends of a text occur in the store.

    Args:
        tokens, order: the store, i32[n] each.
        pattern: i32[M] the newest M tokens of a text, the newest last; -1 where it is shorter.
        reach: how many tokens ``order`` is sorted by.

    Returns:
        low, high i32[M]: entry m - 1 is for the last m tokens, which begin at the places ``order[low:high]`` and nowhere else.
        Nothing is found (low = high) for more than ``reach`` tokens, and where a -1 is among them.

    About 2 log2(n) steps of M gathers of M tokens.
    """
    size, longest = tokens.shape[0], pattern.shape[0]
    count = jnp.arange(1, longest + 1)
    inside = (
        jnp.arange(longest) < count[:, None]
    )  # [M,M]: row m - 1 is the phrase of m tokens, from its first on
    phrase = jnp.take(pattern, (longest - count)[:, None] + jnp.arange(longest), mode="clip")
    real = jnp.all((phrase >= 0) | ~inside, -1) & (count <= reach)

    def before(where):
        """[2,M]: the suffix at order[where] is less than the phrase; it is not greater."""
        start = jnp.take(order, where, mode="clip")[..., None] + jnp.arange(longest)
        text = jnp.take(tokens, start, mode="fill", fill_value=-1)
        differs = (text != phrase) & inside
        at = jnp.argmax(differs, -1)[..., None]
        less = jnp.take_along_axis(text, at, -1) < jnp.take_along_axis(
            jnp.broadcast_to(phrase, text.shape), at, -1
        )
        return jnp.where(differs.any(-1), less[..., 0], jnp.array([[False], [True]]))

    def halve(_, bounds):
        low, high = (
            bounds  # [2,M]: the first row looks for the beginning of the range, the second for its end
        )
        middle = low + (high - low) // 2
        right = before(middle) & (low < high)
        return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

    start = (jnp.zeros((2, longest), jnp.int32), jnp.full((2, longest), size, jnp.int32))
    bounds, _ = jax.lax.fori_loop(0, math.ceil(math.log2(size + 1)), halve, start)
    return jnp.where(real, bounds[0], 0), jnp.where(real, bounds[1], 0)


def continuing(tokens: jax.Array, order: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """bool[M]: whether any of the occurrences that ``find`` found goes on, instead of standing at the end of a document."""
    # The end of a document sorts before every token: if anything follows any of them, then the last one.
    last = jnp.take(order, jnp.maximum(high - 1, 0), mode="clip")
    after = jnp.take(tokens, last + jnp.arange(1, high.shape[0] + 1), mode="fill", fill_value=-1)
    return (high > low) & (after >= 0)


def sample(order: jax.Array, low: jax.Array, high: jax.Array, count: int) -> jax.Array:
    """i32[count]: places of the range ``order[low:high]``, spread evenly over it; each once and then -1 if there are fewer.

    The middle of each of ``count`` equal parts: neighbours in the range have like continuations, so every part speaks for
    its own. A function of the range alone.
    """
    found, index = high - low, jnp.arange(count + 1)
    every, rest = found // count, found % count
    edge = (
        index * every + index * rest // count
    )  # of part i, without products beyond the store's size
    middle = edge[:-1] + (edge[1:] - edge[:-1]) // 2
    chosen = jnp.where(found < count, index[:-1], middle)
    places = jnp.take(order, low + chosen, mode="clip")
    return jnp.where(chosen < found, places, -1).astype(jnp.int32)


def follow(tokens: jax.Array, places: jax.Array, depth: int) -> jax.Array:
    """i32[K,depth]: what stands at ``places`` i32[K] and after, to the end of the document, then -1; all -1 for place -1."""
    at = places[:, None] + jnp.arange(depth)
    text = jnp.take(tokens, at, mode="fill", fill_value=-1)
    going = jnp.cumprod((text >= 0) & (places >= 0)[:, None], -1)
    return jnp.where(going > 0, text, -1)
