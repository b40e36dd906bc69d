"""The shape in which a product with weights is computed, chosen for each backend in one place.

The blocks of decoding have few rows: one to a few tokens of each text. XLA:CPU and XLA:GPU are
fastest with such a block as it is. XLA:TPU makes a loop of multiplications and sums of a product
with one row, and transposes some weights for products with few rows in three axes; both are slower
than one matrix product over a whole tile of 8 rows. ``experiments/tpu_programs`` has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Blocks of at most this many tokens per text are short.
TOKENS = 16
# Rows of a tile of a TPU's vector memory.
TILE = 8
_ahead = False


def compile_ahead_for_tpu() -> None:
    """From now on programs are traced for TPUs too, where this process has none.

    For compiling ahead of time; call it before anything is traced. Every product is then traced
    twice, which takes twice as long.
    """
    global _ahead
    _ahead = True


def for_tpu() -> bool:
    """Whether programs may be compiled for a TPU."""
    return _ahead or jax.default_backend() == "tpu"


def product(compute: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``compute(x)`` for x [...,T,E], a linear map of the last axis: [...,T,F].

    Where the program is compiled for a TPU, a short block is computed as [1,R,E] with R >= 8: rows
    of zeros are added and their results dropped. Other platforms' programs do not change.
    """
    if x.ndim < 2 or x.shape[-2] > TOKENS or not for_tpu():
        return compute(x)
    return jax.lax.platform_dependent(x, tpu=lambda x: _in_tiles(compute, x), default=compute)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x @ kernel`` for x [...,T,E] or [E] and a kernel [E,F], as ``product``."""
    return product(lambda x: x @ kernel, x)


def _in_tiles(compute: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    *batch, size, width = x.shape
    more = max(0, -(-TILE // max(1, math.prod(batch))) - size)
    padded = jnp.pad(x, [(0, 0)] * len(batch) + [(0, more), (0, 0)])
    # Without the barriers the compiler removes the rows of zeros.
    flat = jax.lax.optimization_barrier(padded.reshape(1, -1, width))
    out = jax.lax.optimization_barrier(compute(flat))
    return out.reshape(*batch, size + more, -1)[..., :size, :]
