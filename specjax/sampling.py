"""Sampling settings as maps from logits to probabilities, and the one function that draws a token.

Penalties, biases and bans depend on the text and are applied before (``specjax.logit_maps``); here
the order is: temperature, top-k, top-p, min-p. Temperature 0 gives a one-hot distribution on the
argmax (lowest id on ties). Cut-offs are thresholds on the logit, so tokens that tie with the last
one kept are kept too: the map treats equal logits equally. Settings are arrays, one value per row:
changing them does not recompile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import logit_maps
from specjax.checks import per_row
from specjax.logit_maps import LogitMaps

Scalar = float | Sequence[float] | np.ndarray


class Sampling(struct.PyTreeNode):
    """The sampling settings of each row."""

    temperature: jax.Array  # f32[B], 0 = greedy
    top_k: jax.Array  # i32[B], 0 = off
    top_p: jax.Array  # f32[B], 1 = off
    min_p: jax.Array  # f32[B], 0 = off
    maps: LogitMaps | None = None  # penalties, biases and bans; None: no operation
    lenience: jax.Array | None = None  # f32[B], a rule's value for each row; None: the rule's own

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
    lenience: Scalar | None = None,
    **maps: Any,
) -> Sampling:
    """Settings for ``batch`` rows, from scalars or one value per row.

    Args:
        batch: the number of rows.
        temperature, top_k, top_p, min_p: see ``Sampling``.
        lenience: in (0, 1], for a rule that takes a value for each row (``accept.lenient``, where a
            row with 1 keeps the target's law); None: the rule's own.
        maps: the maps of logits, in the order in which they are applied, before the temperature.
            ``grammar``: an automaton (``logit_maps.grammar.of_regex``, ``of_schema``,
            ``of_table``) that the output follows, for all rows, or one or None for each.
            ``min_new_tokens`` (0): so many new tokens come before one of ``end_ids``, ids that end
            a text (those of ``generate``, and others). ``logit_bias``: token id -> number that is
            added to its logit, or an array f[V]; for all rows, or one for each. ``banned``: ids of
            tokens that are never emitted, or such a list for each row. A grammar, a bias and a ban
            need ``vocab_size``. ``repetition_penalty`` (1): logits of tokens of prompt and output
            are divided by it where positive, and multiplied where negative (CTRL, Keskar et al.
            2019, 1909.05858, section 4.1, and transformers). ``frequency_penalty`` (0): subtracted
            for each occurrence of the token in the output. ``presence_penalty`` (0): subtracted
            once from tokens of the output. (The last two as in OpenAI's API and vLLM; the order is
            vLLM's.)

    Raises:
        UserError: a value out of range, or maps that let no token stay.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    if lenience is not None:
        given["lenience"] = lenience
    rows = {name: per_row(name, value, batch, *_ALLOWED[name]) for name, value in given.items()}
    dtypes = {"top_k": jnp.int32}
    arrays = {name: jnp.asarray(row, dtypes.get(name, jnp.float32)) for name, row in rows.items()}
    return Sampling(**arrays, maps=logit_maps.make(batch, **maps) if maps else None)


_ALLOWED = {
    "temperature": ("in [0, 1e6] (0 = greedy)", lambda x: (x >= 0) & (x <= 1e6)),
    "top_k": logit_maps.COUNT,
    "top_p": ("in (0, 1] (1 = off)", lambda x: (x > 0) & (x <= 1)),
    "min_p": ("in [0, 1] (0 = off)", lambda x: (x >= 0) & (x <= 1)),
    "lenience": ("in (0, 1] (1 = exact)", lambda x: (x > 0) & (x <= 1)),
}


def after_prompt(sampling: Sampling, lengths: jax.Array) -> Sampling:
    """The settings for texts whose first ``lengths`` i32[B] tokens are the prompt."""
    if sampling.maps is None:
        return sampling
    return sampling.replace(maps=logit_maps.begun(sampling.maps, lengths))


def for_draft(sampling: Sampling) -> Sampling:
    """The settings that a drafter reads: without those of the rule."""
    return sampling.replace(lenience=None)


def argmax(logits: jax.Array) -> jax.Array:
    """The most probable token (the lowest id on ties): f[...,V] -> i32[...]. Any token for NaN.

    Two plain reductions: on a CPU several times faster than ``jnp.argmax``, which XLA does not
    vectorise there.
    """
    vocab = logits.shape[-1]
    best = logits == logits.max(-1, keepdims=True)
    return jnp.where(best, jnp.arange(vocab, dtype=jnp.int32), vocab - 1).min(-1)


_BLOCK = 64


def top(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """``jax.lax.top_k`` of f[...,V], several times faster: (scores, ids i32), both [...,count].

    The lower id comes first among equal scores. 0.0 and -0.0 are equal, as in ``argmax``
    (``jax.lax.top_k`` puts -0.0 below 0.0). The best ``count`` tokens are in the ``count`` blocks
    with the highest maxima, so only these blocks are searched.
    """
    vocab = scores.shape[-1]
    if vocab < 4 * _BLOCK * count:
        values, ids = _top_k(scores, count)
        return values, ids.astype(jnp.int32)
    lead = scores.shape[:-1]
    padding = [(0, 0)] * len(lead) + [(0, -vocab % _BLOCK)]
    blocks = jnp.pad(scores, padding, constant_values=-jnp.inf).reshape(*lead, -1, _BLOCK)
    # Sorted by id, so that ties go to the lower id.
    chosen = jnp.sort(_top_k(blocks.max(-1), count)[1], axis=-1)
    few = jnp.take_along_axis(blocks, chosen[..., None], -2).reshape(*lead, -1)
    ids = (chosen[..., None] * _BLOCK + jnp.arange(_BLOCK)).reshape(*lead, -1)
    values, place = _top_k(few, count)
    return values, jnp.take_along_axis(ids, place, -1).astype(jnp.int32)


def _top_k(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    return jax.lax.top_k(jnp.where(scores == 0, 0, scores), count)


def dtype_of(logits: jax.Array):
    """The dtype of probabilities made from these logits: at least float32."""
    return jnp.promote_types(logits.dtype, jnp.float32)


def log_probs(logits: jax.Array) -> jax.Array:
    """f[...,V]: the log-probabilities of logits, without settings, in float32 at least."""
    return jax.nn.log_softmax(logits.astype(dtype_of(logits)), -1)


def to_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The probabilities of each position under the sampling settings.

    Args:
        logits: [B,...,V], any float dtype.
        sampling: settings of the B rows.

    Returns:
        f32[B,...,V] (float64 if the logits are). Rows sum to 1, excluded tokens are exactly 0.
        "Standardised sampling", Leviathan et al. 2023 (2211.17192), section 2.2.
    """
    # One program, also outside a compiled function and where jit is off.
    with jax.disable_jit(False):
        return _to_probs(logits, sampling)


@jax.jit
def _to_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    dtype = dtype_of(logits)

    def per_row(value):  # [B] -> [B,1,...,1]
        return value.reshape(value.shape + (1,) * (logits.ndim - 1))

    logits = logits.astype(dtype)
    greedy = per_row(sampling.greedy)
    temperature = jnp.where(greedy, 1, per_row(sampling.temperature)).astype(dtype)
    # The maximum becomes 0: no overflow at any temperature.
    z = (logits - logits.max(-1, keepdims=True)) / temperature
    top_k, top_p = per_row(sampling.top_k), per_row(sampling.top_p).astype(dtype)
    truncated = ~sampling.greedy & ((sampling.top_k > 0) | (sampling.top_p < 1))
    z = jax.lax.cond(jnp.any(truncated), lambda x: _truncate(x, top_k, top_p), lambda x: x, z)
    # log 0 = -inf: off
    z = jnp.where(z < jnp.log(per_row(sampling.min_p).astype(dtype)), -jnp.inf, z)
    one_hot = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=dtype)
    return jnp.where(greedy, one_hot, jax.nn.softmax(z, -1))


def _truncate(z: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Top-k, then top-p on the remaining tokens: one descending sort gives both thresholds."""
    vocab = z.shape[-1]
    ordered = -jnp.sort(-z, axis=-1)
    k = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    kth = jnp.take_along_axis(ordered, jnp.broadcast_to(k - 1, (*z.shape[:-1], 1)), axis=-1)
    ordered = jnp.where(ordered < kth, -jnp.inf, ordered)
    mass = jax.nn.softmax(ordered, -1)
    # The mass of all better tokens.
    before = jnp.cumsum(mass, -1) - mass
    # top_p of exactly 1 is off, also where the sum is rounded. The best token is kept, even if
    # top_p underflows to 0.
    kept = (before < top_p) | (top_p >= 1) | (jnp.arange(vocab) == 0)
    last = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where((z < kth) | (z < last), -jnp.inf, z)


def draw(key: jax.Array, weights: jax.Array) -> jax.Array:
    """One token i32[] from unnormalised weights [V] >= 0; a token of weight 0 is never drawn.

    Inverse transform in two levels (a block of about sqrt(V) tokens, then a token of the block),
    each with its own uniform number: O(V) sums instead of a long prefix sum, and float32 resolves
    2^-23 of a *block* rather than of the whole vocabulary.
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
