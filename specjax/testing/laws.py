"""The law of the target's text, by enumeration."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.logit_maps import LogitMaps
from specjax.models import lm
from specjax.types import LM


def sequence_law(
    model: LM, params, prompt: Sequence[int], steps: int, *, written: int = 0, **settings
) -> np.ndarray:
    """The exact law of the next ``steps`` tokens after ``prompt``, for any small vocabulary.

    ``settings`` are those of ``sampling.make_sampling``. The last ``written`` tokens of ``prompt``
    are output: penalties tell them from the prompt. Returns float64[V,...,V], ``steps`` axes.
    """
    vocab = model.vocab_size
    continuations = list(itertools.product(range(vocab), repeat=steps - 1))
    tokens = jnp.asarray([list(prompt) + list(c) for c in continuations], jnp.int32)
    rows = sampling.make_sampling(len(continuations), **settings)
    logits = _logits(model, params, tokens)[:, len(prompt) - 1 :]
    if rows.maps is not None:
        logits = _mapped(rows.maps, logits, tokens, len(prompt), len(prompt) - written)
    probs = np.asarray(sampling.to_probs(logits, rows), np.float64)
    heads = np.asarray(continuations, int)[..., None]
    joint = np.take_along_axis(probs[:, :-1], heads, -1).prod(1)
    return (joint * probs[:, -1]).reshape((vocab,) * steps)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: LM, params, tokens: jax.Array) -> jax.Array:
    """f[B,T,V]: the model's logits after each token."""
    return lm.forward(model, params, tokens).logits


def _mapped(
    maps: LogitMaps, logits: jax.Array, tokens: jax.Array, begin: int, prompt: int
) -> jax.Array:
    """The logits f[B,T,V] after the maps; the first ones follow ``begin`` tokens of each text."""
    result = np.array(logits, np.float64)
    for row, text in enumerate(np.asarray(tokens).tolist()):
        for place in range(result.shape[1]):
            parts = text[:prompt], text[prompt : begin + place]
            result[row, place] = mapped_logits(maps, row, result[row, place], *parts)
    return jnp.asarray(result, logits.dtype)


def mapped_logits(
    maps: LogitMaps, row: int, logits: np.ndarray, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """The logits f64[V] of the token after ``prompt`` and ``output``, with the maps of one row.

    In the order of ``specjax.logit_maps``, one token at a time.
    """
    penalties = (maps.repetition, maps.presence, maps.frequency)
    repetition, presence, frequency = (float(rows[row]) for rows in penalties)
    ends, least = np.asarray(maps.ends[row]).tolist(), int(maps.min_new_tokens[row])
    bias = None if maps.bias is None else np.asarray(maps.bias[row], np.float64)
    allowed = _allowed(maps, row, output, len(logits))
    result = np.zeros(len(logits))
    for token, value in enumerate(np.asarray(logits, np.float64).tolist()):
        if token not in allowed or (token in ends and len(output) < least):
            value = -np.inf
        if bias is not None:
            value += bias[token]
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        times = list(output).count(token)
        value -= frequency * times
        if times:
            value -= presence
        result[token] = value
    return result


def _allowed(maps: LogitMaps, row: int, output: Sequence[int], vocab_size: int) -> set[int]:
    """The tokens that the grammar of a row allows after ``output``; all without a grammar.

    Also after a token that was not allowed: no output has it.
    """
    every = set(range(vocab_size))
    if maps.grammar is None:
        return every
    table, classes = np.asarray(maps.grammar.following[row]), np.asarray(maps.grammar.classes[row])
    state = int(maps.grammar.start[row])
    for token in output:
        state = int(table[state, classes[token]]) if 0 <= token < vocab_size else 0
        if state <= 0:
            return every
    return {token for token in every if table[state, classes[token]] >= 0}
