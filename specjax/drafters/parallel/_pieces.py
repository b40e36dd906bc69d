"""Pieces of a row's own text at pseudo-random places: a drafter's first guesses for tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pieces(tokens: jax.Array, length: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """One piece of the text for each text position in ``places``.

    A piece begins at a hash of the position. So no key is needed, and a row's pieces do not depend
    on its batch. A piece that reaches the end of the text continues at the beginning.

    Args:
        tokens, length: the texts, i32[B,S] and i32[B].
        places: i32[B,n] text positions.
        size: tokens of a piece.

    Returns:
        i32[B,n,size].
    """
    # Knuth's multiplicative hash.
    scattered = (places.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 8
    start = (scattered % length[:, None].astype(jnp.uint32)).astype(jnp.int32)
    index = (start[..., None] + jnp.arange(size)) % length[:, None, None]
    return jnp.take_along_axis(tokens, index.reshape(len(tokens), -1), 1).reshape(index.shape)
