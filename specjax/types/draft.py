"""What a drafter proposes, and what a rule decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flax import struct

from specjax.rng import RowKeys
from specjax.types.model import Array

# How the siblings of a draft were made. A rule relies on it.
CHAIN = "chain"  # no siblings: at most one child each, drawn from ``probs`` or deterministic
IID = "iid"  # drawn independently from one distribution
INDEPENDENT = "independent"  # each from its own distribution (several drafters)
WITHOUT_REPLACEMENT = "without_replacement"  # without the siblings before it
DETERMINISTIC = "deterministic"  # a function of the committed text; ``probs`` is None
SIBLINGS = (CHAIN, IID, INDEPENDENT, WITHOUT_REPLACEMENT, DETERMINISTIC)


class Draft(struct.PyTreeNode):
    """N candidate nodes in topological order; siblings in the order in which they were drawn."""

    tokens: Array  # i32[B,N]
    # bool[B,N] False: the node does not exist, nor does any node below it. Its token is not read.
    valid: Array
    # i32[B,N], -1 = child of the pending token; None = the chain 0-1-2-...
    parents: Array | None = None
    # f32[B,N,V] the distribution that each node was actually drawn from, given its prefix and the
    # siblings before it (drawn without replacement: their tokens have probability 0);
    # None = deterministic.
    probs: Array | None = None
    # bool[B] whether the drafter's own logits were finite; None = the drafter computes no logits
    finite: Array | None = None
    # i32[B] the first nodes that are fed even if invalid: ``update`` reads the output; None = 0
    fed: Array | None = None
    # M, the length of the longest possible path; None = N
    depth: int | None = struct.field(pytree_node=False, default=None)

    @property
    def longest(self) -> int:
        """M, static: the largest number of draft tokens that can be accepted."""
        return self.tokens.shape[1] if self.depth is None else self.depth


class Verdict(struct.PyTreeNode):
    """The decision of a rule: the accepted path, then one token of the target."""

    tokens: Array  # i32[B,M+1] padded with -1
    count: Array  # i32[B] tokens emitted, 1..M+1; 0 for a finished row
    path: Array  # i32[B,M] ids of the accepted nodes, padded with -1


# L1: output law identical to the target's; L2: identical under greedy decoding only; L3: lossy.
CLASSES = ("L1", "L2", "L3")

AcceptFn = Callable[[RowKeys, Draft, Array], Verdict]


class Accept(NamedTuple):
    """An acceptance rule.

    ``sampled(keys, draft, target_probs f32[B,N+1,V]) -> Verdict`` decides from probabilities.
    ``greedy(draft, logits f32[B,N+1,V]) -> Verdict`` decides for rows of temperature 0, so that
    greedy decoding computes no softmax (and a lossy rule can see near-ties).
    Drafts of 0 nodes (N = 0) occur. ``specjax.accept.verdict`` has what a rule needs.
    """

    sampled: AcceptFn
    greedy: Callable[[Draft, Array], Verdict]
    name: str
    lossless_class: str  # one of CLASSES
    # The kinds of drafts that the rule takes. For any other its lossless class does not hold.
    siblings: tuple[str, ...] = (CHAIN,)
    # Whether a decision depends on the probs at all nodes, not only along the accepted path.
    whole_tree: bool = False
