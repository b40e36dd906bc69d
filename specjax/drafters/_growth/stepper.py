"""What a method provides to be grown: the stepper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct

from specjax.tree import Layout


class Begun(NamedTuple):
    """The pending token was read."""

    logits: jax.Array  # f[B,V] after the pending token
    kept: Any  # what the method keeps between rounds
    # What it computed for the pending token, if nodes read it: arrays [B,1,...], the first place of
    # the block. None: the pending token is in ``kept``.
    memory: Any = None
    ready: jax.Array | None = None  # bool[B] False: the row cannot draft in this round; None = all
    # What ``step`` reads in the place of ``kept``, and what is not carried to the next round: the
    # target's cache. None: it reads ``kept``.
    reads: Any = None


class Nodes(NamedTuple):
    """n draft nodes of one level that are fed; they are the newest of the block's P places."""

    tokens: jax.Array  # i32[B,n]
    # Place of the parent in the block, -1 = the pending token if it has no place: i32[B,n], or
    # [n] and static if it is the same in all rows.
    parents: jax.Array | np.ndarray
    depth: jax.Array | int  # i32[] 1 for the children of the pending token
    layout: Layout  # which of the P places each node may read, as in ``LM.apply``


class Drafted(struct.PyTreeNode):
    """The accepted nodes that were fed."""

    block: Any  # arrays [B,P,...]
    count: jax.Array  # i32[B] how many
    places: jax.Array | None  # i32[B,M] their places in the block, -1 padded; None: 0, 1, 2, ...


class Stepper(NamedTuple):
    """A method as pure functions; ``params`` is the pair ``ModelParams``.

    - ``init(params, context, target_out, slots) -> kept``: as ``Drafter.init``.
    - ``begin(params, context, kept) -> Begun``: reads the committed text up to the pending token.
    - ``step(params, kept, Nodes, block) -> (logits f[B,n,V], memory [B,n,...])``: what follows n
      nodes, and what their own children need of them. ``block`` has the memory of the nodes that
      were fed before (None if there are none). ``kept`` is not changed while a draft grows; it is
      ``Begun.reads`` if there is such a thing.
    - ``commit(params, kept, Drafted | None, verdict, target_out) -> kept``: after the verdict. A
      row with verdict count 0 keeps its state.
    """

    init: Callable[..., Any]
    begin: Callable[..., Begun]
    step: Callable[..., tuple[jax.Array, Any]]
    commit: Callable[..., Any]
    # Whether ``step`` takes a traced depth: a chain is then one compiled loop of any length.
    looped: bool = False
    # Whether the logits depend on the depth alone and not on the draft's tokens: ``step`` is then
    # called once for each level, with one node.
    independent: bool = False
    # Whether ``commit`` reads the block.
    commits_block: bool = False
    # Whether ``begin`` may be left out in rounds without drafts: it catches up later, or has
    # nothing to catch up with.
    lazy: bool = False
    # (memory of n nodes) -> f[B,n]: the method's estimate that the next token after each is
    # accepted, from what ``begin`` and ``step`` return; for controllers. None: it has none.
    confidence: Callable[[Any], jax.Array] | None = None
    # Whether ``Drafter.lower`` reads the block, with the pending token's place.
    lends_block: bool = False

    @property
    def keeps_block(self) -> bool:
        """Whether the drafter's state has the block."""
        return self.commits_block or self.lends_block


class State(struct.PyTreeNode):
    """What the drafter carries from round to round."""

    kept: Any  # the stepper's
    control: Any = ()  # the controller's
    # Arrays [B,P,...], with ``Stepper.keeps_block``: the memory of the last draft.
    block: Any = None
    # i32[B,N] place of each node of a dynamic tree in the block, -1: not fed.
    places: jax.Array | None = None


def at(values: Any, places: jax.Array | np.ndarray) -> Any:
    """The entries at ``places`` of arrays [B,P,...]: i32[B,n], or i32[n] static."""
    if places.ndim == 1:
        return jax.tree.map(lambda x: x[:, places], values)
    return jax.tree.map(lambda x: jax.vmap(lambda row, index: row[index])(x, places), values)
