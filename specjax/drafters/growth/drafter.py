"""The drafter of a stepper: the functions of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import control, logit_maps, tree
from specjax.bound import Bound
from specjax.control import Ahead, Controller
from specjax.drafters.growth import levels
from specjax.drafters.growth import stepper as growing
from specjax.drafters.growth.plans import Fixed, Plan, Pooled
from specjax.drafters.growth.siblings import Family, draw
from specjax.drafters.growth.stepper import Drafted, Job, Nodes, Rows, State, Stepper, at
from specjax.rng import RowKeys
from specjax.sampling import dtype_of, log_probs
from specjax.topology import dynamic
from specjax.tree import chain_layout
from specjax.types import (
    CHAIN,
    COUPLED,
    IID,
    Array,
    Context,
    Draft,
    Drafter,
    Lasting,
    ModelParams,
    Output,
    Rare,
    Rest,
    Training,
    Verdict,
)


class _Setup(NamedTuple):
    """The static settings."""

    stepper: Stepper
    plan: Plan

    @property
    def is_static(self) -> bool:
        """Whether each node has the same number in all rounds."""
        sizes = self.plan.controller is not None and self.plan.controller.size is not None
        return isinstance(self.plan.growth, Fixed) and not sizes

    @property
    def is_chain(self) -> bool:
        return self.plan.growth.siblings == CHAIN


def build(
    name: str,
    stepper: Stepper,
    plan: Plan,
    init_params: Callable[..., Any],
    *,
    probs: Callable[..., Array] | None = None,
    training: Training | None = None,
    features: bool = False,
    gaps: bool = False,
) -> Drafter:
    """The drafter that grows its drafts with ``stepper`` as ``plan`` describes.

    The other arguments are those of ``Drafter``. L1 with a rule that takes its siblings.
    """
    setup, (growth, controller) = _Setup(stepper, plan), plan
    control.check_tree(controller, name, growth.siblings, growth.nodes)
    # Paths of a beam search with a common prefix leave nodes unused.
    full = controller is None and not (isinstance(growth, Pooled) and growth.beams)
    return Drafter(
        init_params=init_params,
        init=Bound(_init, setup),
        propose=Bound(_propose, setup),
        update=Bound(_update, setup),
        nodes=growth.nodes,
        name=name,
        siblings=growth.siblings,
        depth=growth.depth,
        constant_cost=full,
        # Also without replacement, although there can be fewer tokens than siblings: it is rare.
        whole=full,
        history=controller is not None and controller.has_state,
        adaptive=controller is not None,
        features=features,
        gaps=gaps,
        probs=probs,
        training=training,
        rare=Rare(
            # A lazy stepper begins with what it lacks.
            rest=rest(controller, Bound(_idle, setup), stepper.lazy and not features),
            check_rows=controller and controller.check_rows,
            lengths=() if controller is None else controller.lengths,
            sizes=() if controller is None else controller.sizes(growth.nodes),
            verdicts=controller is not None and controller.has_state,
        ),
    )


def rest(controller: Controller | None, idle: Callable[..., Any], lasting: bool) -> Rest | None:
    """``Rare.rest``: the rounds for which the controller's limit is 0.

    ``lasting``: whether nothing of the state changes in them but ``control``, the controller's.
    """
    if controller is None or controller.limit is None:
        return None
    pause = controller.pause if lasting else None
    after = pause and Lasting(Bound(_pause_rounds, pause), Bound(_after_pause, pause))
    return Rest(Bound(_resting, controller), idle, after)


def updated(controller: Controller, state: Any, draft: Draft, verdict: Verdict) -> Any:
    """The controller's state after a verdict."""
    new = controller.update(state, draft, verdict)
    return new if controller.shared else tree.where_rows(verdict.count > 0, new, state)


def _pause_rounds(pause: Lasting, state: Any, live: Array) -> Array:
    return pause.rounds(state.control, live)


def _after_pause(pause: Lasting, state: Any, rounds: Array) -> Any:
    return state.replace(control=pause.after(state.control, rounds))


def _resting(controller: Controller, state: Any) -> Array:
    return jnp.asarray(control.longest(controller, state.control) == 0)


def _idle(setup: _Setup, params: ModelParams, _: RowKeys, context: Context, state: State) -> State:
    if setup.stepper.lazy:
        return state
    # The logits are not read, so they are not computed.
    return state.replace(kept=setup.stepper.begin(params, context, state.kept).kept)


def _init(setup: _Setup, params: ModelParams, context: Context, out: Output, slots: int) -> State:
    kept = setup.stepper.init(params, context, out, slots)
    batch, controller = context.length.shape[0], setup.plan.controller
    state = State(kept, () if controller is None else controller.init(context))
    if not setup.stepper.keeps_block:
        return state
    growth = setup.plan.growth
    if isinstance(growth, Fixed):
        fed = sum(bool(children) for children in growth.shape.children[1:])
    else:
        fed = sum(width for width, _ in growth.levels)
    places = None if setup.is_static else jnp.full((batch, growth.nodes), -1, jnp.int32)
    return state.replace(block=_empty(setup, params, context, kept, fed), places=places)


def _empty(setup: _Setup, params: ModelParams, context: Context, kept: Any, fed: int) -> Any:
    """A block with room for ``fed`` nodes, and for the pending token if it has a place."""
    batch = context.length.shape[0]

    def one() -> tuple[Any, Any]:
        begun = setup.stepper.begin(params, context, kept)
        token, parent = jnp.zeros((batch, 1), jnp.int32), jnp.full((batch, 1), -1, jnp.int32)
        nodes = Nodes(token, parent, 1, chain_layout(batch, 1, int(begun.memory is not None)))
        return begun.memory, setup.stepper.step(params, begun.source, nodes, begun.memory)[1]

    # Only the shapes are needed.
    root, like = tree.shapes(one)
    return growing.room(like, fed if root is None else fed + 1)


def _propose(
    setup: _Setup, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> tuple[Draft, State]:
    stepper, (growth, controller) = setup
    begun = stepper.begin(params, context, state.kept)
    vocab, how = begun.logits.shape[-1], context.sampling.maps
    text = logit_maps.read(how, context.tokens, context.length, vocab)
    most = control.longest(controller, state.control)
    job = Job(stepper, controller, params, keys, context, begun, text, most)
    rows, places = growing.first_rows(job, state.control), state.places
    if not isinstance(growth, Fixed):
        draft, places, block, rows = grow_pool(job, rows, growth)
    elif setup.is_chain and stepper.looped and growth.nodes > 1:
        room = state.block
        if room is None and begun.memory is not None:
            room = growing.room(begun.memory, growth.nodes)
        elif room is None:
            room = _empty(setup, params, context, state.kept, growth.nodes - 1)
        draft, block, rows = grow_chain(job, rows, growth, room)
    else:
        draft, places, block, rows = levels.grow(job, rows, growth)
        if setup.is_chain:
            draft = draft.replace(parents=None, depth=None)
    if begun.ready is not None and draft.finite is not None:
        # A row that cannot draft may have logits that are not finite.
        draft = draft.replace(finite=draft.finite | ~begun.ready)
    state = state.replace(kept=begun.kept, control=rows.control)
    if stepper.keeps_block:
        state = state.replace(block=state.block if block is None else block, places=places)
    return draft, state


def _update(
    setup: _Setup, params: ModelParams, state: State, draft: Draft, verdict: Verdict, out: Output
) -> State:
    stepper, (_, controller) = setup
    drafted = _drafted(setup, state, verdict) if stepper.commits_block else None
    kept = stepper.commit(params, state.kept, drafted, verdict, out)
    if controller is not None:
        state = state.replace(control=updated(controller, state.control, draft, verdict))
    return state.replace(kept=kept)


def _drafted(setup: _Setup, state: State, verdict: Verdict) -> Drafted:
    """The accepted nodes that were fed: all but a last one that is a leaf."""
    growth = setup.plan.growth
    fed = jax.tree.leaves(state.block)[0].shape[1]
    # A verdict that was cut ends with the pending token of the next round, which is not committed.
    most = jnp.maximum(verdict.count - 1, 0)
    if setup.is_chain:
        accepted = (verdict.path >= 0).sum(-1)
        return Drafted(state.block, jnp.minimum(jnp.minimum(accepted, most), fed), None)
    path = verdict.path
    if not path.shape[1]:  # the round verified no node
        return Drafted(state.block, jnp.zeros_like(verdict.count), path)
    if setup.is_static and isinstance(growth, Fixed):
        if growth.siblings in (IID, COUPLED):
            # Equal siblings: the path may pass from a leaf, never fed, to the children of a sibling
            # with the same token. The ancestors of its last node were all fed.
            steps = (path >= 0).sum(-1, keepdims=True)
            nodes = jnp.pad(path, ((0, 0), (1, 0)), constant_values=-1)
            last = jnp.take_along_axis(nodes, steps, 1)[:, 0]
            path = jnp.asarray(levels.node_paths(growth.shape))[last + 1]
        places = jnp.asarray(levels.fed_places(growth.shape))[jnp.maximum(path, 0)]
    else:
        assert state.places is not None
        places = jnp.take_along_axis(state.places, jnp.maximum(path, 0), 1)
    places = jnp.where(path >= 0, places, -1)
    count = jnp.cumprod(places >= 0, -1).sum(-1)
    return Drafted(state.block, jnp.minimum(count, most).astype(jnp.int32), places)


# A chain, grown in one compiled loop: the program has the same size for every length.


# Log-probabilities f[B,1], for the controller: of the path, and of its newest token.
LogProbs = tuple[Array, Array]


class _Carry(struct.PyTreeNode):
    """The chain so far."""

    draft: Draft  # all gamma nodes; those beyond the last drawn one are empty
    block: Any  # the memory of the nodes that were fed
    rows: Rows
    log_prob: LogProbs


def grow_chain(job: Job, rows: Rows, growth: Fixed, block: Any) -> tuple[Draft, Any, Rows]:
    """A chain of gamma nodes, the block, and the rows.

    ``block`` has room for the gamma - 1 nodes that are fed, and for the pending token if it has a
    place. Without a controller every row gets all nodes; with one the loop ends when no row goes
    on.
    """
    if job.roots:
        block = tree.put(block, job.begun.memory, 0)
    carry, level = _begin(job, rows, growth, block), Bound(_level, job, growth.how)
    if job.controller is None:
        carry = jax.lax.fori_loop(1, growth.nodes, level, carry)
    else:

        def running(pair: tuple[Array, _Carry]) -> Array:
            return (pair[0] < growth.nodes) & pair[1].rows.going.any()

        start = jnp.ones((), jnp.int32), carry
        carry = jax.lax.while_loop(running, lambda pair: (pair[0] + 1, level(*pair)), start)[1]
    return carry.draft.replace(finite=carry.rows.finite), carry.block, carry.rows


def _begin(job: Job, rows: Rows, growth: Fixed, block: Any) -> _Carry:
    """The chain with its first node."""
    logits = growing.mapped(job, job.begun.logits[:, None])
    start = jnp.zeros((job.batch, 1), dtype_of(logits))
    one, rows = _next(job, growth.how, 0, logits, job.begun.memory, rows, (start, start))
    empty = growing.room(one, growth.nodes)
    return _Carry(tree.put(empty, one, 0), block, rows, _after(job, (start, start), logits, one))


def _level(job: Job, siblings: str, index: Array, carry: _Carry) -> _Carry:
    """Feeds node ``index`` - 1 and draws node ``index``."""
    index = jnp.asarray(index, jnp.int32)
    own = job.roots + index - 1  # its place in the block
    layout = growing.next_layout(job.batch, jax.tree.leaves(carry.block)[0].shape[1], own)
    token = jax.lax.dynamic_slice_in_dim(carry.draft.tokens, index - 1, 1, 1)
    nodes = Nodes(token, jnp.broadcast_to(own - 1, (job.batch, 1)), index, layout)
    # The loop ends when no row goes on, so the step needs no condition of its own.
    logits, memory = job.stepper.step(job.params, job.begun.source, nodes, carry.block)
    if job.text is not None:
        above = jnp.arange(carry.draft.tokens.shape[1]) < index
        logits = growing.mapped(job, logits, carry.draft.tokens, above[None, None])
    one, rows = _next(job, siblings, index, logits, memory, carry.rows, carry.log_prob)
    draft, block = tree.put(carry.draft, one, index), tree.put(carry.block, memory, own)
    return _Carry(draft, block, rows, _after(job, carry.log_prob, logits, one))


def _next(
    job: Job, siblings: str, index: Any, logits: Array, memory: Any, rows: Rows, log_prob: LogProbs
) -> tuple[Draft, Rows]:
    """Node ``index``, drawn from ``logits`` f[B,1,V], and the rows that have it.

    ``memory`` is that of the node before it.
    """
    (path, token), sure = log_prob, growing.confidence(job, memory, 1)
    rows = growing.ask(job, rows, Ahead(index, logits, path, rows.going[:, None], token, sure))
    zero = np.zeros(1, int)
    level = Family(jnp.reshape(index, (1,)), zero, zero, jnp.reshape(index, (1,)) - 1, index)
    return draw(job, rows, logits, zero, level, siblings), rows


def _after(job: Job, log_prob: LogProbs, logits: Array, one: Draft) -> LogProbs:
    """``_Carry.log_prob`` of the path with its new token; only a controller reads it."""
    if job.controller is None:
        return log_prob
    token = growing.token_log_prob(logits, one.tokens).astype(log_prob[0].dtype)
    return log_prob[0] + token, token


# A tree whose shape depends on the context: candidates level by level, then the best of all.
#
# EAGLE-2's dynamic tree, ReDrafter's beam search, and the best-first trees and trees of the best
# parents of a stepper whose logits depend on the depth alone (``topology.dynamic``).


class _Pool(struct.PyTreeNode):
    """Candidate nodes: those of one level, or all."""

    tokens: Array  # i32[B,P]
    total: Array  # f[B,P] log-probability of the path
    score: Array  # f[B,P] what it is chosen by: ``total``, or with ``families`` the parent's
    parents: Array  # i32[B,P] index in the whole pool; -1: child of the pending token
    places: Array  # i32[B,P] place in the block; -1: not fed
    valid: Array  # bool[B,P]


class _Front(struct.PyTreeNode):
    """The nodes of a level that get children."""

    tokens: Array  # i32[B,K]
    total: Array  # f[B,K]
    own: Array  # f[B,K] log-probability of the token itself
    index: Array  # i32[B,K] in the whole pool; -1: the pending token
    place: Array  # i32[B,K] in the block
    above: Array  # i32[B,F] the places of the parents of all nodes that were fed, these last
    # i32[B,K,L] the tokens of the path, the node's own last; None: rows without maps of logits.
    path: Array | None


class _Above(struct.PyTreeNode):
    """What the candidates of a level have from their parents."""

    places: Array  # i32[B,C] places of the parents in the block
    paths: Array | None  # i32[B,C,L] the parents' paths; None: rows without maps of logits
    own: Array  # f[B,C] log-probability of the candidate itself, given its parent


def grow_pool(job: Job, rows: Rows, plan: Pooled) -> tuple[Draft, Array, Any, Rows]:
    """The draft, the places of its nodes i32[B,N] in the block (-1: not fed), the block, the rows.

    Scores come from the draft's own logits, without the row's temperature and cut-offs (as in the
    authors' code): these would change which tree is best, never the output law.
    """
    levels, size, block = [], 0, job.begun.memory
    front = _first(job)
    for depth, (width, top_k) in enumerate(plan.levels):
        nodes = None
        if depth and not job.stepper.independent:
            layout = tree.layout(front.above, front.tokens.shape[1])
            parents = front.above[:, -front.tokens.shape[1] :]
            nodes = Nodes(front.tokens, parents, depth, layout)
        logits, memory, block = growing.feed(job, rows, depth, nodes, block)
        logits = _mapped(job, logits, front)
        exist = jnp.broadcast_to(rows.going[:, None], front.total.shape)
        sure = growing.confidence(job, memory, front.total.shape[1])
        rows = growing.ask(job, rows, Ahead(depth, logits, front.total, exist, front.own, sure))
        level, above = _children(front, logits, top_k, plan)
        if job.controller is not None:
            # Nodes that do not exist are the last to be chosen.
            exists = rows.going[:, None]
            total, score = (jnp.where(exists, x, -jnp.inf) for x in (level.total, level.score))
            level = level.replace(total=total, score=score)
        level = level.replace(valid=jnp.broadcast_to(rows.going[:, None], level.tokens.shape))
        if plan.beams:
            level, above = at((level, above), dynamic.frontier(level.total, plan.beams))
        if width:
            front, level = _frontier(front, level, above, width, size)
        size += level.tokens.shape[1]
        levels.append(level)
    pool: _Pool = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *levels)
    if plan.beams:
        chosen, parents, kept = dynamic.paths(pool.parents, pool.valid, plan.beams, plan.nodes)
        pool = pool.replace(valid=pool.valid & kept)
    else:
        chosen, parents = dynamic.rerank(pool.score, pool.parents, plan.nodes)
    best: _Pool = at(pool, chosen)
    draft = Draft(best.tokens, best.valid, parents, finite=rows.finite, depth=plan.depth)
    if not job.sizes:
        return draft, best.places, block, rows
    above = jnp.where(parents < 0, 0, jnp.take_along_axis(best.total, jnp.maximum(parents, 0), 1))
    own = jnp.where(best.valid, best.total - above, -jnp.inf)
    draft, order, rows = growing.sized(job, rows, draft, own)
    return draft, jnp.take_along_axis(best.places, order, 1), block, rows


def _first(job: Job) -> _Front:
    """The pending token."""
    minus = jnp.full((job.batch, 1), -1, jnp.int32)
    total = jnp.zeros((job.batch, 1), dtype_of(job.begun.logits))
    above = minus[:, : job.roots]
    path = None if job.text is None else jnp.zeros((job.batch, 1, 0), jnp.int32)
    return _Front(job.context.pending[:, None], total, total, minus, minus + job.roots, above, path)


def _mapped(job: Job, logits: Array, front: _Front) -> Array:
    """The logits after the nodes of the frontier, with the maps of their paths."""
    if front.path is None or not front.path.shape[2]:
        return growing.mapped(job, logits)
    batch, size, depth = front.path.shape
    own = jnp.repeat(jnp.eye(size, dtype=bool), depth, 1)
    logits = jnp.broadcast_to(logits, (batch, size, logits.shape[-1]))
    return growing.mapped(job, logits, front.path.reshape(batch, -1), own[None])


def _children(front: _Front, logits: Array, top_k: int, plan: Pooled) -> tuple[_Pool, _Above]:
    """The children of the frontier, and what is known of their parents."""
    tokens, total, parent = dynamic.expand(front.total, log_probs(logits), top_k, plan.most)
    known = front.index, front.place, front.path, front.total
    parents, places, paths, before = at(known, parent)
    unfed, every = jnp.full_like(tokens, -1), jnp.ones_like(tokens, bool)
    own = jnp.where(jnp.isfinite(total), total - before, -jnp.inf)
    score = before if plan.families else total
    return _Pool(tokens, total, score, parents, unfed, every), _Above(places, paths, own)


def _frontier(
    front: _Front, level: _Pool, above: _Above, width: int, size: int
) -> tuple[_Front, _Pool]:
    """The ``width`` best nodes of a level, and the level with their places.

    ``size`` is the number of candidates before this level.
    """
    best = dynamic.frontier(level.total, width)
    tokens, total, above = at((level.tokens, level.total, above), best)
    paths = above.paths
    fed = front.above.shape[1] + jnp.arange(width, dtype=jnp.int32)
    place = jnp.broadcast_to(fed, best.shape)
    places = jax.vmap(lambda row, index, to: row.at[index].set(to))(level.places, best, place)
    every = jnp.concatenate([front.above, above.places], 1)
    if paths is not None:
        paths = jnp.concatenate([paths, tokens[..., None]], 2)
    front = _Front(tokens, total, above.own, size + best, place, every, paths)
    return front, level.replace(places=places)
