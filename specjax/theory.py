"""Closed forms of speculative decoding (Leviathan et al. 2023, 2211.17192; card A3)."""

from __future__ import annotations

from collections.abc import Sequence


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per round if every draft token is accepted with probability ``alpha`` independently: eq. 1."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_tokens_by_depth(acceptance: Sequence[float]) -> float:
    """Tokens per round from measured conditional acceptance at each depth: 1 + sum of running products."""
    total, running = 1.0, 1.0
    for a in acceptance:
        running *= a
        total += running
    return total


def speedup(tokens_per_round: float, draft: float, verify: float, step: float = 1.0) -> float:
    """Speed-up over plain decoding when a round drafts for ``draft`` and verifies for ``verify``, and a step takes ``step``.

    Theorem 3.8 with a measured verification time instead of the assumption that it costs one step.
    """
    return tokens_per_round * step / (draft + verify)
