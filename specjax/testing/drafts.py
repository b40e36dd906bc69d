"""Checks the arrays of one draft: topology, tokens and probabilities."""

from __future__ import annotations

import numpy as np

from specjax.errors import UserError
from specjax.types import CHAIN, DETERMINISTIC, IID, WITHOUT_REPLACEMENT, Draft

# How far from 1 the sum of float32 probabilities may be.
SUM = 1e-4


def check_draft(
    draft: Draft, vocab_size: int, siblings: str, greedy: np.ndarray | None = None
) -> None:
    """Raises UserError, naming row and node, unless ``draft`` is what ``siblings`` requires.

    Args:
        draft: the result of ``propose``, concrete arrays.
        vocab_size: V.
        siblings: the drafter's kind, one of ``types.SIBLINGS``.
        greedy: bool[B] rows of temperature 0; their probs are not checked.
    """
    tokens = np.asarray(draft.tokens)
    batch, size = tokens.shape
    parents = (
        np.broadcast_to(np.arange(size) - 1, (batch, size))
        if draft.parents is None
        else np.asarray(draft.parents)
    )
    if (draft.parents is None) != (siblings == CHAIN):
        raise UserError(
            f"siblings are {siblings!r}: parents must be None for a chain, and only for a chain"
        )
    _check_topology(parents, np.asarray(draft.valid), vocab_size)
    valid = _existing(parents, np.asarray(draft.valid))
    _refuse(valid & ((tokens < 0) | (tokens >= vocab_size)), f"a token outside 0..{vocab_size - 1}")
    if draft.probs is None:
        return
    if siblings == DETERMINISTIC:
        raise UserError(
            "a deterministic draft has no probs; leave them out, or declare how the siblings "
            "were drawn (Drafter.siblings)"
        )
    sampled = valid if greedy is None else valid & ~np.asarray(greedy)[:, None]
    probs = np.asarray(draft.probs, np.float64)
    tokens = np.clip(tokens, 0, vocab_size - 1)
    _check_probs(probs, tokens, sampled)
    _check_siblings(probs, tokens, parents, sampled, siblings)


def _existing(parents: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """bool[B,N]: valid nodes whose ancestors are all valid."""
    valid, row = valid.copy(), np.arange(len(valid))
    for node in range(valid.shape[1]):
        above = parents[:, node]
        valid[:, node] &= (above < 0) | valid[row, np.maximum(above, 0)]
    return valid


def _check_topology(parents: np.ndarray, valid: np.ndarray, vocab_size: int) -> None:
    size = parents.shape[1]
    _refuse(
        valid & (parents >= np.arange(size)),
        "a parent that does not come before it; order the nodes topologically",
    )
    _refuse(valid & (parents < -1), "a parent below -1")
    for node in range(size):
        count = ((parents == parents[:, [node]]) & valid).sum(1)
        if valid[:, node].any() and (count[valid[:, node]] > vocab_size).any():
            raise UserError(
                f"node {node} is one of {count.max()} siblings; the vocabulary has {vocab_size} "
                "tokens"
            )


def _check_probs(probs: np.ndarray, tokens: np.ndarray, sampled: np.ndarray) -> None:
    _refuse(sampled & ~np.isfinite(probs).all(-1), "probs that are not finite")
    _refuse(sampled & (probs.min(-1) < 0), "a negative probability")
    _refuse(sampled & (np.abs(probs.sum(-1) - 1) > SUM), "probs that do not sum to 1")
    own = np.take_along_axis(probs, tokens[..., None], -1)[..., 0]
    _refuse(sampled & (own <= 0), "a token of probability 0 in its own probs")


def _check_siblings(
    probs: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    sampled: np.ndarray,
    siblings: str,
) -> None:
    row = np.arange(len(probs))
    for node in range(probs.shape[1]):
        for earlier in range(node):
            pair = (
                sampled[:, node] & sampled[:, earlier] & (parents[:, node] == parents[:, earlier])
            )
            if siblings == IID:
                error = np.abs(probs[:, node] - probs[:, earlier]).max(-1)
                _refuse(
                    (pair & (error > SUM))[:, None],
                    "other probs than its sibling; i.i.d. siblings share one distribution",
                    node,
                )
            if siblings == WITHOUT_REPLACEMENT:
                again = probs[row, node, tokens[:, earlier]] > 0
                _refuse(
                    (pair & again)[:, None],
                    "a positive probability for the token of an earlier sibling",
                    node,
                )


def _refuse(bad: np.ndarray, what: str, node: int | None = None) -> None:
    if bad.any():
        row, place = np.argwhere(bad)[0]
        raise UserError(f"row {row}, node {place if node is None else node} has {what}")
