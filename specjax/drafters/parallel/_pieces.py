"""Pieces of a row's own text at places that look random and are not: where a drafter needs a first guess for a token."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pieces(tokens: jax.Array, length: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """One piece of ``size`` tokens for each text position in ``places`` i32[B,n], out of tokens i32[B,S]: i32[B,n,size].

    It begins at a hash of the position (no key is needed, and a row's piece does not depend on its batch) and runs on from the
    end of the text to its beginning.
    """
    scattered = (
        places.astype(jnp.uint32) * jnp.uint32(2654435761)
    ) >> 8  # Knuth's multiplicative hash
    start = (scattered % length[:, None].astype(jnp.uint32)).astype(jnp.int32)
    index = (start[..., None] + jnp.arange(size)) % length[:, None, None]
    return jnp.take_along_axis(tokens, index.reshape(len(tokens), -1), 1).reshape(index.shape)
