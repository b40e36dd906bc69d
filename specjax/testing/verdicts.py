"""The form of a verdict: its path must be a path of the draft, and its tokens those of the path.

A rule can emit the right tokens along a wrong path. The text of that round is then right, but the
cache entries of other nodes are committed. Nodes with the same tokens on their paths are copies:
their entries are equal, so the parent of a node may be a copy of the node before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree
from specjax.accept.verdict import parents as parents_of
from specjax.tree import duplicates
from specjax.types import Accept, Draft, Verdict

MISTAKES = (
    "a path that is not padded with -1 at its end",
    "a path with a node that does not exist",
    "a path on which the parent of a node is not the node before it",
    "tokens that are not the draft's tokens on the path",
    "a count that is not the number of accepted nodes + 1",
    "a last token outside the vocabulary",
)


class WrongVerdict(AssertionError):
    """A verdict that contradicts itself or the draft."""


def mistakes(draft: Draft, verdict: Verdict, vocab: int) -> jax.Array:
    """i32[B]: the index in ``MISTAKES`` of the first mistake of each row's verdict, -1 for none.

    ``draft`` as the rule received it: nodes that do not exist are not valid.
    """
    # One program, where the outcomes of a round are enumerated too.
    with jax.disable_jit(False):
        return _mistakes(draft, verdict, vocab)


@functools.partial(jax.jit, static_argnums=2)
def _mistakes(draft: Draft, verdict: Verdict, vocab: int) -> jax.Array:
    size = draft.tokens.shape[1]
    path, count = verdict.path, verdict.count
    node, on = jnp.clip(path, 0, max(size - 1, 0)), path >= 0
    parents = parents_of(draft)
    before = jnp.pad(path, ((0, 0), (1, 0)), constant_values=-1)[:, : path.shape[1]]
    if size:
        take = functools.partial(jnp.take_along_axis, indices=node, axis=1)
        exist = take(tree.exists(draft.valid, draft.parents)) & (path < size)
        above, drafted = take(parents), take(draft.tokens)
        first = jnp.broadcast_to(jnp.arange(size), parents.shape)
        if draft.parents is not None:
            first = duplicates.first_with_path(draft, parents, jnp.ones_like(draft.valid))
        # Copies have the same number here; the root is 0.
        first = jnp.pad(first + 1, ((0, 0), (1, 0)))
        pick = functools.partial(jnp.take_along_axis, first, axis=1)
        follows = pick(above + 1) == pick(jnp.clip(before + 1, 0, size))
    else:
        exist = follows = jnp.zeros_like(on)
        drafted = jnp.zeros_like(path)
    accepted = on.sum(-1)
    last = jnp.take_along_axis(verdict.tokens, accepted[:, None], 1, mode="clip")[:, 0]
    each = [
        (on & (jnp.arange(path.shape[1]) >= accepted[:, None])).any(-1),
        (on & ~exist).any(-1),
        (on & ~follows).any(-1),
        (on & (verdict.tokens[:, : path.shape[1]] != drafted)).any(-1),
        count != accepted + 1,
        (last < 0) | (last >= vocab),
    ]
    wrong = jnp.stack(each, -1)
    return jnp.where(wrong.any(-1), jnp.argmax(wrong, -1), -1).astype(jnp.int32)


def enforced(rule: Accept) -> Accept:
    """The rule; it raises WrongVerdict for a verdict with a mistake. Not for compiled functions."""

    def check(draft: Draft, verdict: Verdict, vocab: int) -> Verdict:
        wrong = np.asarray(mistakes(draft, verdict, vocab))
        if (wrong >= 0).any():
            row = int(np.argmax(wrong >= 0))
            given, nodes = jax.tree.map(lambda x: np.asarray(x[row]).tolist(), (verdict, draft))
            raise WrongVerdict(
                f"the rule gave {MISTAKES[wrong[row]]}: tokens {given.tokens}, count "
                f"{given.count}, path {given.path}; draft tokens {nodes.tokens}, valid "
                f"{nodes.valid}" + ("" if nodes.parents is None else f", parents {nodes.parents}")
            )
        return verdict

    return _then(rule, check)


def _then(rule: Accept, change: Callable[[Draft, Verdict, int], Verdict]) -> Accept:
    """The rule with verdicts that are changed afterwards, given the draft and the vocabulary."""

    def sampled(keys, draft, target_probs):
        return change(draft, rule.sampled(keys, draft, target_probs), target_probs.shape[-1])

    def greedy(draft, logits):
        return change(draft, rule.greedy(draft, logits), logits.shape[-1])

    return rule._replace(sampled=sampled, greedy=greedy)


@functools.lru_cache(maxsize=64)
def marked(rule: Accept) -> Accept:
    """The rule; where a verdict has mistake i, it emits the token id ``mark(vocab, i)`` instead.

    For compiled loops, which get the ids of ``marks`` as end-of-sequence ids: such a row ends.
    """

    def mark(draft: Draft, verdict: Verdict, vocab: int) -> Verdict:
        wrong = mistakes(draft, verdict, vocab)
        bad = wrong >= 0
        first = jnp.arange(verdict.tokens.shape[1]) == 0
        ids = jnp.where(first, (vocab + 1 + wrong)[:, None], -1)
        return Verdict(
            jnp.where(bad[:, None], ids, verdict.tokens).astype(verdict.tokens.dtype),
            jnp.where(bad, 1, verdict.count).astype(verdict.count.dtype),
            jnp.where(bad[:, None], -1, verdict.path).astype(verdict.path.dtype),
        )

    return _then(rule, mark)


def marks(vocab: int) -> tuple[int, ...]:
    """The token ids that ``marked`` emits, one for each of ``MISTAKES``."""
    return tuple(vocab + 1 + index for index in range(len(MISTAKES)))


def marked_rows(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """i64[R]: the mistakes in texts [B,S] of a loop with a ``marked`` rule, one for each row."""
    ends = tokens.max(-1, initial=-1) - (vocab + 1)
    return ends[ends >= 0]
