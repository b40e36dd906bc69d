"""The maps of logits written out for one token of one text, without the code that they test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.logit_maps import LogitMaps


def mapped_logits(
    maps: LogitMaps, row: int, logits: np.ndarray, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """The logits f64[V] of the token after ``prompt`` and ``output``, with the maps of one row.

    In the order of ``specjax.logit_maps``, one token at a time.
    """
    repetition, presence, frequency = (
        float(x[row]) for x in (maps.repetition, maps.presence, maps.frequency)
    )
    ends, least = np.asarray(maps.ends[row]).tolist(), int(maps.min_new_tokens[row])
    bias = None if maps.bias is None else np.asarray(maps.bias[row], np.float64)
    result = np.zeros(len(logits))
    for token, value in enumerate(np.asarray(logits, np.float64).tolist()):
        if token in ends and len(output) < least:
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
