"""Looks at a draft as a reviewer would: is it a tree, is it what its drafter says it is, are its laws laws?"""

from __future__ import annotations

import numpy as np

from specjax.errors import UserError
from specjax.types import CHAIN, DETERMINISTIC, IID, WITHOUT_REPLACEMENT, Draft

SUM = 1e-4  # how far from 1 a float32 law may sum


def check_draft(
    draft: Draft, vocab_size: int, siblings: str, greedy: np.ndarray | None = None
) -> None:
    """Raises UserError, naming row and node, unless ``draft`` (concrete arrays) is what ``siblings`` promises.

    Args:
        draft: what ``propose`` gave.
        vocab_size: V.
        siblings: the drafter's kind, one of ``types.SIBLINGS``.
        greedy: bool[B] rows of temperature 0: their laws are not looked at.
    """
    tokens, valid = np.asarray(draft.tokens), np.array(draft.valid)
    batch, size = tokens.shape
    parents = (
        np.broadcast_to(np.arange(size) - 1, (batch, size))
        if draft.parents is None
        else np.asarray(draft.parents)
    )
    if (draft.parents is None) != (siblings == CHAIN):
        raise UserError(
            f"siblings are said to be {siblings!r}; parents must be None for a chain, and only for one"
        )
    _topology(parents, valid, vocab_size)
    for node in range(size):  # what hangs below a withdrawn node does not exist either
        above = parents[:, node]
        valid[:, node] &= (above < 0) | valid[np.arange(batch), np.maximum(above, 0)]
    _no(valid & ((tokens < 0) | (tokens >= vocab_size)), f"a token outside 0..{vocab_size - 1}")
    if draft.probs is None:
        return
    if siblings == DETERMINISTIC:
        raise UserError(
            "a deterministic draft has no laws; leave probs out, or say how the siblings were drawn"
        )
    sampled = valid & ~(
        np.zeros((batch, 1), bool) if greedy is None else np.asarray(greedy)[:, None]
    )
    probs = np.asarray(draft.probs, np.float64)
    _no(sampled & ~np.isfinite(probs).all(-1), "a law that is not finite")
    _no(sampled & (probs.min(-1) < 0), "a law with negative mass")
    _no(sampled & (np.abs(probs.sum(-1) - 1) > SUM), "a law that does not sum to 1")
    own = np.take_along_axis(probs, np.clip(tokens, 0, vocab_size - 1)[..., None], -1)[..., 0]
    _no(sampled & (own <= 0), "a token that its own law cannot draw")
    for node in range(size):
        for elder in range(node):
            pair = sampled[:, node] & sampled[:, elder] & (parents[:, node] == parents[:, elder])
            if siblings == IID:
                off = np.abs(probs[:, node] - probs[:, elder]).max(-1) > SUM
                _no((pair & off)[:, None], "siblings of different laws, said to be i.i.d.", node)
            if siblings == WITHOUT_REPLACEMENT:
                seen = (
                    probs[np.arange(batch), node, np.clip(tokens[:, elder], 0, vocab_size - 1)] > 0
                )
                _no(
                    (pair & seen)[:, None],
                    "a law that could draw its elder sibling's token again",
                    node,
                )


def _topology(parents: np.ndarray, valid: np.ndarray, vocab_size: int) -> None:
    size = parents.shape[1]
    _no(
        valid & (parents >= np.arange(size)),
        "a parent that does not come before it; order the nodes topologically",
    )
    _no(valid & (parents < -1), "a parent below -1")
    for node in range(size):
        count = ((parents == parents[:, [node]]) & valid).sum(1)
        if valid[:, node].any() and (count[valid[:, node]] > vocab_size).any():
            raise UserError(
                f"node {node} is one of {count.max()} siblings; the vocabulary has {vocab_size} tokens"
            )


def _no(bad: np.ndarray, what: str, node: int | None = None) -> None:
    if bad.any():
        row, place = np.argwhere(bad)[0]
        raise UserError(f"row {row}, node {place if node is None else node} has {what}")
