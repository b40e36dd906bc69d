"""Sampling settings as maps from logits to probabilities, and the one function that draws a token.

Order: temperature, top-k, top-p, min-p. Temperature 0 is the one-hot law of the argmax (lowest id on ties). Cut-offs are
thresholds on the logit, so tokens that tie with the last one kept are kept too: the map treats equal logits equally.
Settings are arrays, one value a row: changing them does not recompile.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.errors import UserError

Scalar = float | Sequence[float] | np.ndarray


class Sampling(struct.PyTreeNode):
    """How each row is sampled."""

    temperature: jax.Array  # f32[B], 0 = greedy
    top_k: jax.Array  # i32[B], 0 = off
    top_p: jax.Array  # f32[B], 1 = off
    min_p: jax.Array  # f32[B], 0 = off

    @property
    def greedy(self) -> jax.Array:
        """bool[B]"""
        return self.temperature <= 0


def make_sampling(
    batch: int,
    temperature: Scalar = 1.0,
    top_k: Scalar = 0,
    top_p: Scalar = 1.0,
    min_p: Scalar = 0.0,
) -> Sampling:
    """Settings for ``batch`` rows, from scalars or one value per row.

    Raises:
        UserError: a value out of range.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    rows = {}
    for name, value in given.items():
        array = np.asarray(value, np.float64)
        if array.shape not in ((), (batch,)):
            raise UserError(
                f"{name} has shape {array.shape}; give one number, or one for each of the {batch} rows"
            )
        rows[name] = np.broadcast_to(array, (batch,))
    _check(
        rows["temperature"],
        "temperature",
        "in [0, 1e6] (0 = greedy)",
        lambda x: (x >= 0) & (x <= 1e6),
    )
    _check(
        rows["top_k"],
        "top_k",
        "a whole number >= 0 (0 = off)",
        lambda x: (x >= 0) & (x == np.floor(x)) & (x < 2**31),
    )
    _check(rows["top_p"], "top_p", "in (0, 1] (1 = off)", lambda x: (x > 0) & (x <= 1))
    _check(rows["min_p"], "min_p", "in [0, 1] (0 = off)", lambda x: (x >= 0) & (x <= 1))
    return Sampling(
        temperature=jnp.asarray(rows["temperature"], jnp.float32),
        top_k=jnp.asarray(rows["top_k"], jnp.int32),
        top_p=jnp.asarray(rows["top_p"], jnp.float32),
        min_p=jnp.asarray(rows["min_p"], jnp.float32),
    )


def _check(rows: np.ndarray, name: str, right: str, ok) -> None:
    bad = ~ok(rows)
    if bad.any():
        raise UserError(f"{name} is {rows[bad][0]:g}; it must be {right}")


def argmax(logits: jax.Array) -> jax.Array:
    """The most probable token (the lowest id on ties): f[...,V] -> i32[...]. Where a logit is NaN, any token.

    Two plain reductions: on a CPU several times quicker than ``jnp.argmax``, which XLA does not vectorise there.
    """
    vocab = logits.shape[-1]
    best = jnp.where(
        logits == logits.max(-1, keepdims=True), jnp.arange(vocab, dtype=jnp.int32), vocab - 1
    )
    return best.min(-1)


_BLOCK = 64


def top(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """``jax.lax.top_k`` of f[...,V], the lower id first among equals: (scores, ids i32) [...,count], several times quicker.

    Zeros are equal whatever their sign, as in ``argmax`` (``jax.lax.top_k`` has -0 below 0). The best tokens lie in those
    blocks of tokens whose own best are the best, so only these are looked at.
    """
    vocab = scores.shape[-1]
    if vocab < 4 * _BLOCK * count:
        values, ids = _top_k(scores, count)
        return values, ids.astype(jnp.int32)
    lead = scores.shape[:-1]
    padded = jnp.pad(
        scores, [(0, 0)] * len(lead) + [(0, -vocab % _BLOCK)], constant_values=-jnp.inf
    )
    blocks = padded.reshape(*lead, -1, _BLOCK)
    chosen = jnp.sort(_top_k(blocks.max(-1), count)[1], axis=-1)  # in the order of ids, for ties
    few = jnp.take_along_axis(blocks, chosen[..., None], -2).reshape(*lead, -1)
    ids = (chosen[..., None] * _BLOCK + jnp.arange(_BLOCK)).reshape(*lead, -1)
    values, place = _top_k(few, count)
    return values, jnp.take_along_axis(ids, place, -1).astype(jnp.int32)


def _top_k(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    values, ids = jax.lax.top_k(jnp.where(scores == 0, 0, scores), count)
    return values, ids


def dtype_of(logits: jax.Array):
    """The dtype of probabilities made from these logits: at least float32."""
    return jnp.promote_types(logits.dtype, jnp.float32)


def to_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The adjusted law of each position.

    Args:
        logits: [B,...,V], any float dtype.
        sampling: settings of the B rows.

    Returns:
        f32[B,...,V] (float64 if the logits are), rows sum to 1, excluded tokens exactly 0. "Standardised sampling",
        Leviathan et al. 2023 (2211.17192), section 2.2.
    """
    dtype = dtype_of(logits)

    def per_row(value):  # [B] -> [B,1,...,1]
        return value.reshape(value.shape + (1,) * (logits.ndim - 1))

    logits = logits.astype(dtype)
    greedy = per_row(sampling.greedy)
    temperature = jnp.where(greedy, 1, per_row(sampling.temperature)).astype(dtype)
    z = (
        logits - logits.max(-1, keepdims=True)
    ) / temperature  # the maximum is now 0: no overflow at any temperature
    top_k, top_p = per_row(sampling.top_k), per_row(sampling.top_p).astype(dtype)
    wanted = ~sampling.greedy & ((sampling.top_k > 0) | (sampling.top_p < 1))
    z = jax.lax.cond(jnp.any(wanted), lambda x: _truncate(x, top_k, top_p), lambda x: x, z)
    z = jnp.where(
        z < jnp.log(per_row(sampling.min_p).astype(dtype)), -jnp.inf, z
    )  # log 0 = -inf: off
    one_hot = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=dtype)
    return jnp.where(greedy, one_hot, jax.nn.softmax(z, -1))


def _truncate(z: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Top-k, then top-p on what is left: one descending sort gives both thresholds."""
    vocab = z.shape[-1]
    ordered = -jnp.sort(-z, axis=-1)
    k = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    kth = jnp.take_along_axis(ordered, jnp.broadcast_to(k - 1, (*z.shape[:-1], 1)), axis=-1)
    ordered = jnp.where(ordered < kth, -jnp.inf, ordered)
    mass = jax.nn.softmax(ordered, -1)
    before = jnp.cumsum(mass, -1) - mass  # mass of all better tokens: the first is always kept
    # Exactly 1 is off, whatever the rounding of the sum; and the best token stays even if top_p underflows to 0.
    kept = (before < top_p) | (top_p >= 1) | (jnp.arange(vocab) == 0)
    last = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where((z < kth) | (z < last), -jnp.inf, z)


def draw(key: jax.Array, weights: jax.Array) -> jax.Array:
    """One token from unnormalised non-negative weights [V]; a token of weight 0 is never drawn.

    Inverse transform in two levels (a block of about sqrt(V) tokens, then a token of the block), each with its own
    uniform number: O(V) sums instead of a long prefix sum, and float32 resolves 2^-23 of a *block* rather than of the
    whole vocabulary. Returns i32[].
    """
    vocab = weights.shape[-1]
    width = max(1, int(np.ceil(np.sqrt(vocab))))
    blocks = jnp.pad(weights, (0, -vocab % width)).reshape(-1, width)
    outer, inner = jax.random.uniform(key, (2,), weights.dtype)
    block = _inverse_cdf(blocks.sum(-1), outer)
    return block * width + _inverse_cdf(blocks[block], inner)


def _inverse_cdf(weights: jax.Array, u: jax.Array) -> jax.Array:
    total = jnp.cumsum(weights)
    beyond = (total > u * total[-1]) & (weights > 0)
    positive = jnp.arange(weights.shape[-1]) * (weights > 0)
    return jnp.where(beyond.any(), jnp.argmax(beyond), jnp.max(positive)).astype(jnp.int32)


def draw_rows(keys: jax.Array, weights: jax.Array) -> jax.Array:
    """``draw`` over leading axes: keys [...], weights [...,V] -> i32[...]."""
    fn = draw
    for _ in range(keys.ndim):
        fn = jax.vmap(fn)
    return fn(keys, weights)
