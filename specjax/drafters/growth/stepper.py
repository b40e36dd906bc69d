"""What a method provides to be grown, the stepper; and the rows of a draft while it grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import control as control_lib
from specjax import logit_maps, tree
from specjax.bound import Bound
from specjax.control import Ahead, Controller
from specjax.rng import RowKeys
from specjax.sampling import log_probs
from specjax.tree import Layout
from specjax.types import LM, Array, Context, Draft, ModelParams, Verdict, no_state, same_state


class Begun(NamedTuple):
    """The pending token was read."""

    logits: Array  # f[B,V] after the pending token
    kept: Any  # what the method keeps between rounds
    # What it computed for the pending token, if nodes read it: arrays [B,1,...], the first place of
    # the block. None: the pending token is in ``kept``.
    memory: Any = None
    ready: Array | None = None  # bool[B] False: the row cannot draft in this round; None = all
    # What ``step`` reads in the place of ``kept``, and what is not carried to the next round: the
    # target's cache. None: it reads ``kept``.
    reads: Any = None

    @property
    def source(self) -> Any:
        """What ``Stepper.step`` reads of the committed text."""
        return self.kept if self.reads is None else self.reads


class Nodes(NamedTuple):
    """n draft nodes of one level that are fed; they are the newest of the block's P places."""

    tokens: Array  # i32[B,n]
    # Place of the parent in the block, -1 = the pending token if it has no place: i32[B,n], or
    # [n] and static if it is the same in all rows.
    parents: Array | np.ndarray
    depth: Array | int  # i32[] 1 for the children of the pending token
    layout: Layout  # which of the P places each node may read, as in ``LM.apply``


class Drafted(struct.PyTreeNode):
    """The accepted nodes that were fed."""

    block: Any  # arrays [B,P,...]
    count: Array  # i32[B] how many
    places: Array | None  # i32[B,M] their places in the block, -1 padded; None: 0, 1, 2, ...


class Stepper(NamedTuple):
    """A method as pure functions; ``params`` is the pair ``ModelParams``.

    - ``begin(params, context, kept) -> Begun``: reads the committed text up to the pending token.
    - ``step(params, kept, Nodes, block) -> (logits f[B,n,V], memory [B,n,...])``: what follows n
      nodes, and what their own children need of them. ``block`` has the memory of the nodes that
      were fed before (None if there are none). ``kept`` is not changed while a draft grows; it is
      ``Begun.reads`` if there is such a thing.
    - ``init(params, context, target_out, slots) -> kept``: as ``Drafter.init``.
    - ``commit(params, kept, Drafted | None, verdict, target_out) -> kept``: after the verdict. A
      row with verdict count 0 keeps its state.
    """

    begin: Callable[..., Begun]
    step: Callable[..., tuple[Array, Any]]
    init: Callable[..., Any] = no_state
    commit: Callable[..., Any] = same_state
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
    confidence: Callable[[Any], Array] | None = None
    # Whether ``Rare.lower`` reads the block, with the pending token's place.
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
    # i32[B,N] place of each node in the block, -1: not fed. None: the same in all rounds.
    places: Array | None = None


def logits_and_block(model: LM, *args: Any) -> tuple[Array, Any]:
    """A pass of a model as ``Stepper.step`` gives it: a node's memory is its part of the block."""
    out, block = model.apply(*args)
    return out.logits, block


def step_of_model(
    model: LM, own: Callable[..., Any], params: ModelParams, cache: Any, nodes: Nodes, block: Any
) -> tuple[Array, Any]:
    """``Stepper.step`` of a model that reads ``cache``; ``own(params)`` are its parameters."""
    given = nodes.tokens, cache, nodes.layout, block
    return logits_and_block(model, own(params), *given)


def step_at_depth(params: ModelParams, logits: Array, nodes: Nodes, *_: Any) -> tuple[Array, Array]:
    """``Stepper.step`` where the logits f[B,K,V] of all depths were computed before the draft."""
    return logits[:, nodes.depth][:, None], nodes.tokens


def fed_to_target(values: Any, verdict: Verdict) -> Any:
    """What the target computed of the pending token and the accepted nodes.

    ``values`` are arrays [B,N+1,...] of a round's tokens; the result's are [B,M+1,...], with zeros
    at other places.
    """
    places = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    return tree.take(values, places, jnp.arange(places.shape[1]) < verdict.count[:, None])


def lacking(
    tokens: Array, end: Array, length: Array, width: int, shift: int = 0
) -> tuple[Array, Array]:
    """What a cache of ``length`` i32[B] slots lacks of the first ``end`` i32[B], at most ``width``.

    (How many slots, i32[B]; the tokens i32[B,width] of the next slots, of which slot t has the one
    at t + shift of the texts ``tokens`` i32[B,S].)
    """
    places = length[:, None] + shift + jnp.arange(width)
    own = jnp.take_along_axis(tokens, places, axis=1, mode="clip")
    return jnp.clip(end - length, 0, width), own


def room(like: Any, places: int) -> Any:
    """Zeros for so many places like those of ``like``, arrays [B,n,...] or their shapes."""
    return jax.tree.map(lambda x: jnp.zeros((x.shape[0], places, *x.shape[2:]), x.dtype), like)


def next_layout(batch: int, size: int, filled: Array) -> Layout:
    """The layout of a chain's next token, after a block of ``size`` places, the first ones filled.

    The new token has the last column.
    """
    column = jnp.arange(size + 1)
    visible = (column < filled) | (column == size)
    depth = jnp.where(column == size, filled, column).astype(jnp.int32)
    every = (batch, 1, size + 1)
    visible, depth = jnp.broadcast_to(visible, every), jnp.broadcast_to(depth, every)[:, 0]
    return Layout(visible, depth, chain=True)


def at(values: Any, places: Array | np.ndarray) -> Any:
    """The entries at ``places`` of arrays [B,P,...]: i32[B,n], or i32[n] static."""
    if places.ndim == 1:
        return jax.tree.map(lambda x: x[:, places], values)
    return jax.tree.map(lambda x: jax.vmap(lambda row, index: row[index])(x, places), values)


# What all shapes share: the rows that go on, and the question to the controller.


class Job(NamedTuple):
    """One draft: what does not change while it grows."""

    stepper: Stepper
    controller: Controller | None
    params: ModelParams
    keys: RowKeys
    context: Context
    begun: Begun
    text: logit_maps.Text | None  # what the row's maps of logits read of the committed text
    limit: Array | None = None  # i32[B] the controller's limit of levels; None: it has none

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self.context.length.shape[0]

    @property
    def sizes(self) -> bool:
        """Whether the controller chooses among the nodes of the grown tree."""
        return self.controller is not None and self.controller.size is not None

    @property
    def roots(self) -> int:
        """1 if the pending token has a place in the block, else 0."""
        return 0 if self.begun.memory is None else 1


class Rows(struct.PyTreeNode):
    """The rows while a draft grows."""

    going: Array  # bool[B] whether the row gets further levels
    finite: Array  # bool[B] whether all logits were finite that the row used
    control: Any  # the controller's state


def mapped(job: Job, logits: Array, tokens: Array | None = None, visible: Any = None) -> Array:
    """Logits f[B,n,V] after the row's penalties, biases and bans, like the target's.

    ``tokens`` i32[B,P] are nodes of the draft, ``visible`` bool[B,n,P] (or [1,n,P]) those on the
    path of each of the n places; None: the places follow the committed text.
    """
    return logit_maps.for_draft(job.context.sampling.maps, job.text, logits, tokens, visible)


def first_rows(job: Job, control: Any) -> Rows:
    """All rows that can draft."""
    every = jnp.ones((job.batch,), bool)
    going = every if job.begun.ready is None else job.begun.ready
    return Rows(going if job.limit is None else going & (job.limit > 0), every, control)


def confidence(job: Job, memory: Any, size: int) -> Array | None:
    """``Ahead.confidence`` of ``size`` nodes with this memory; None: there is none."""
    if job.controller is None or job.stepper.confidence is None:
        return None
    return jnp.broadcast_to(job.stepper.confidence(memory), (job.batch, size))


def ask(job: Job, rows: Rows, ahead: Ahead) -> Rows:
    """The rows after the controller's answer about the next level."""
    good = jnp.isfinite(ahead.logits.max(-1)).all(-1)
    rows = rows.replace(finite=rows.finite & (good | ~rows.going))
    if job.limit is not None:
        rows = rows.replace(going=rows.going & (ahead.depth < job.limit))
    if job.controller is None or job.controller.ask is None:
        return rows
    answer, control = job.controller.ask(rows.control, ahead)
    going = rows.going
    return rows.replace(going=going & answer, control=tree.where_rows(going, control, rows.control))


def sized(job: Job, rows: Rows, draft: Draft, log_prob: Array) -> tuple[Draft, Array, Rows]:
    """The nodes of a tree that the controller takes; see ``control.sized``."""
    assert job.controller is not None
    draft, order, state = control_lib.sized(job.controller, rows.control, draft, log_prob)
    return draft, order, rows.replace(control=state)


def feed(job: Job, rows: Rows, depth: int, nodes: Nodes | None, block: Any) -> tuple[Any, Any, Any]:
    """The logits after the nodes of a level, their memory, and the block with it.

    ``nodes`` None: the pending token, or any node of an independent stepper. With a controller it
    is computed only if a row goes on, and else zeros.
    """
    if depth == 0:
        return job.begun.logits[:, None], job.begun.memory, block
    if nodes is None:
        layout = tree.chain_layout(job.batch, 1, job.roots)
        nodes = Nodes(job.context.pending[:, None], np.array([job.roots - 1]), depth, layout)

    def run() -> tuple[Array, Any]:
        return job.stepper.step(job.params, job.begun.source, nodes, block)

    controlled = job.controller is not None
    skipped = Bound(tree.zeros, run)
    logits, memory = jax.lax.cond(rows.going.any(), run, skipped) if controlled else run()
    if not job.stepper.independent:
        block = memory if block is None else tree.join(block, memory)
    return logits, memory, block


def children_log_prob(logits: Array, above: np.ndarray, tokens: Array) -> Array:
    """f[B,n]: the log-probability of tokens i32[B,n]; ``above`` [n] is the place of each in
    ``logits`` f[B,k,V]."""
    rows = jnp.arange(len(tokens))[:, None]
    return log_probs(logits)[rows, above, tokens]


def token_log_prob(logits: Array, tokens: Array) -> Array:
    """f[B,n]: the log-probability of tokens i32[B,n], chosen from ``logits`` f[B,n,V]."""
    return jnp.take_along_axis(log_probs(logits), tokens[..., None], -1)[..., 0]
