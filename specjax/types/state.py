"""What a decode loop carries, and what it returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from flax import struct

from specjax.sampling import Sampling
from specjax.types.draft import Draft
from specjax.types.model import Array


class DecodeState(struct.PyTreeNode):
    """Everything that a decode loop carries."""

    tokens: Array  # i32[B,S] prompt, then output; -1 beyond ``length``
    length: Array  # i32[B]
    limit: Array  # i32[B] the row stops at this length
    done: Array  # bool[B]
    # i32[B] -1: nothing failed; r >= 0: logits were not finite in round r; -2 - r: the row could go
    # on and got no token in round r. A row that failed is done.
    failed: Array
    cache: Any  # the target's
    draft: Any  # the drafter's state
    keys: Array  # key[B]
    round: Array  # i32[]
    sampling: Sampling
    taps: tuple[Array, ...] = ()  # [B,E] each: see ``Context``
    # f32[B,S] the log-probability of each token of the output, by the target's own logits, before
    # maps and temperature; 0 elsewhere. None: not wanted.
    logprobs: Array | None = None
    made_for: str = struct.field(pytree_node=False, default="")  # tag of the drafter


class StepInfo(NamedTuple):
    """What happened in one round (returned, never carried)."""

    draft: Draft
    tokens: Array  # i32[B,M+1] emitted, padded with -1
    emitted: Array  # i32[B] tokens committed, after cutting at end-of-sequence and length limit
    accepted: Array  # i32[B] draft tokens that the rule accepted, before cutting
    # i32[B] proposed nodes that could be tested (all nodes before them on their path are valid)
    drafted: Array
    # i32[B] depths at which a draft token was tested: accepted, and one more unless the path ended
    tested: Array
    # i32[B] tokens that the target was fed, with the pending one; 0 for a finished row
    verified: Array


class Records(NamedTuple):
    """The counts of ``StepInfo`` for every round of a compiled loop; zeros for unused rounds.

    R is the number of rounds that there is room for.
    """

    emitted: Array  # i32[R,B]
    accepted: Array  # i32[R,B]
    drafted: Array  # i32[R,B]
    tested: Array  # i32[R,B]
    verified: Array  # i32[R,B]
