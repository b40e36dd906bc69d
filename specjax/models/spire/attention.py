"""Attention of a SPIRe draft model: over committed slots, the block, and the token itself.

It differs from ``specjax.models.attention`` in what has keys and values: with feedback memory those
of earlier tokens and those of the token itself have different inputs, and a token may attend to
nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.models import rope
from specjax.models.attention import Attention, Scores


class Part(NamedTuple):
    """Keys and values that T tokens may attend to."""

    keys: jax.Array  # [B,H,n,D]
    values: jax.Array
    visible: jax.Array  # bool[B,T,n]
    # Whether a value may be not finite; only tokens that attend to it may get NaN.
    guarded: bool = False


def heads_of(
    attention: Attention, kind: str, read: jax.Array, angle: jax.Array | None
) -> jax.Array:
    """The queries ("q"), keys ("k") or values ("v") of ``read`` [B,T,E]: [B,T,heads,D].

    ``angle`` f32[B,T,D/2] is that of ``rope.angle``; None: the layer has no rotary positions.
    """
    x = getattr(attention, kind)(read)
    normed = kind != "v" and attention.qk_norm != "none"
    if normed and attention.qk_norm == "whole":
        x = getattr(attention, f"{kind}_norm")(x)
    x = x.reshape(*read.shape[:2], -1, attention.width)
    if normed and attention.qk_norm == "head":
        x = getattr(attention, f"{kind}_norm")(x)
    if kind == "v" or attention.rope is None or angle is None:
        return x
    return rope.rotate(x, angle, attention.rope)


def attend(
    q: jax.Array, rule: Scores, parts: list[Part], own: tuple[jax.Array, jax.Array] | None
) -> jax.Array:
    """Attention of queries [B,T,N,D] over the parts: [B,T,N*D], zeros for tokens without any.

    ``own``: keys and values [B,T,H,D]; each token attends to its own too. None: it does not.
    """
    batch, size, heads, width = q.shape
    if not parts and own is None:
        return jnp.zeros((batch, size, heads * width), q.dtype)
    kv_heads = parts[0].keys.shape[1] if own is None else own[0].shape[2]
    # [B,H,G,T,D]: the queries of a group share a key head.
    q = q.reshape(batch, size, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = [_scores(q, rule, part, wide) for part in parts]
    mine = None if own is None else [x.swapaxes(1, 2)[:, :, None] for x in own]
    if mine is not None:
        products = (q.astype(wide) * mine[0].astype(wide)).sum(-1, keepdims=True)
        scores.append(rule.of(products))
    peaks = [each.max(-1, keepdims=True) for each in scores]
    peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, peaks))
    out, total = jnp.zeros(q.shape, q.dtype), jnp.zeros(peak.shape, wide)
    for part, each in zip(parts, scores, strict=False):
        weights = jnp.where(part.visible[:, None, None], jnp.exp(each - peak), 0)
        out, total = out + _values(weights, part, q.dtype), total + weights.sum(-1, keepdims=True)
    if mine is not None:
        weights = jnp.exp(scores[-1] - peak)
        out, total = out + weights.astype(q.dtype) * mine[1].astype(q.dtype), total + weights
    out = (out / jnp.where(total > 0, total, 1)).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, size, -1)


def _scores(q: jax.Array, rule: Scores, part: Part, wide) -> jax.Array:
    """[B,H,G,T,n]."""
    products = jnp.einsum(
        "bhgtd,bhnd->bhgtn", q, part.keys.astype(q.dtype), preferred_element_type=wide
    )
    return jnp.where(part.visible[:, None, None], rule.of(products), jnp.finfo(wide).min)


def _values(weights: jax.Array, part: Part, dtype) -> jax.Array:
    """[B,H,G,T,D]: the sum of the values with weights that are not normalised."""
    values, weights = part.values.astype(dtype), weights.astype(dtype)
    if not part.guarded:
        return jnp.einsum("bhgtn,bhnd->bhgtd", weights, values)
    # A token's weight elsewhere is 0, but 0 * NaN is NaN.
    finite = jnp.isfinite(values).all((1, 3))
    values = jnp.where(finite[:, None, :, None], values, 0)
    out = jnp.einsum("bhgtn,bhnd->bhgtd", weights, values)
    reaches = (part.visible & ~finite[:, None]).any(-1)
    return jnp.where(reaches[:, None, None, :, None], jnp.nan, out)
