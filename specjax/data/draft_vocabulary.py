"""Which tokens a head with a small vocabulary can draft: the most frequent ones of its text.

EAGLE-3 (Li et al. 2025, 2503.01840) and its code: the tokens that are labels most often.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specjax.errors import UserError


def most_frequent(
    counts: np.ndarray, size: int, vocab_size: int, always: Iterable[int] = ()
) -> np.ndarray:
    """i32[size] ascending: the tokens with the highest counts.

    Args:
        counts: i64[n], n at most ``vocab_size``: how often each token is a label.
        size: of the draft vocabulary.
        vocab_size: V.
        always: tokens that are in it at any count: those that end a text.

    Of tokens with equal counts the lowest ids come first, so tokens that do not occur fill the rest
    from id 0 on. Raises UserError for a size that does not fit.
    """
    first = sorted({int(token) for token in always if 0 <= token < vocab_size})
    if not max(len(first), 1) <= size <= vocab_size:
        raise UserError(
            f"draft_vocab is {size}; it must be at least {max(len(first), 1)} and at most the "
            f"target's {vocab_size} tokens"
        )
    whole = np.zeros(vocab_size, np.int64)
    whole[: len(counts)] = counts
    whole[first] = np.iinfo(np.int64).max
    # Stable: equal counts stay in the order of their ids.
    return np.sort(np.argsort(-whole, kind="stable")[:size]).astype(np.int32)
