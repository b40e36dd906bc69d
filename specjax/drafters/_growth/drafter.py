"""The drafter of a stepper: the functions of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import control, logit_maps
from specjax.bound import Bound
from specjax.drafters._growth import chain, levels, pool
from specjax.drafters._growth import rows as growing
from specjax.drafters._growth.plans import Fixed, Plan, Pooled
from specjax.drafters._growth.rows import Job
from specjax.drafters._growth.stepper import Drafted, Nodes, State, Stepper
from specjax.rng import RowKeys
from specjax.tree import chain_layout
from specjax.types import (
    CHAIN,
    IID,
    Context,
    Draft,
    Drafter,
    Lasting,
    ModelParams,
    Output,
    Rest,
    Training,
    Verdict,
)


class _Setup(NamedTuple):
    """The static settings."""

    stepper: Stepper
    plan: Plan

    @property
    def is_chain(self) -> bool:
        return self.plan.growth.siblings == CHAIN


def build(
    name: str,
    stepper: Stepper,
    plan: Plan,
    init_params: Callable[..., Any],
    *,
    probs: Callable[..., jax.Array] | None = None,
    training: Training | None = None,
    features: bool = False,
    gaps: bool = False,
) -> Drafter:
    """The drafter that grows its drafts with ``stepper`` as ``plan`` describes.

    The other arguments are those of ``Drafter``. L1 with a rule that takes its siblings.
    """
    setup, growth = _Setup(stepper, plan), plan.growth
    # Paths of a beam search with a common prefix leave nodes unused.
    full = plan.controller is None and not (isinstance(growth, Pooled) and growth.beams)
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
        history=plan.controller is not None and plan.controller.has_state,
        adaptive=plan.controller is not None,
        rest=_rest(setup, features),
        check_rows=None if plan.controller is None else plan.controller.check_rows,
        features=features,
        gaps=gaps,
        probs=probs,
        training=training,
    )


def pausing(pause: Lasting) -> Lasting:
    """``Rest.lasting`` of a state whose ``control`` is the controller's, and nothing else changes.

    A drafter whose target's outputs are not read, and which can miss rounds.
    """
    return Lasting(Bound(_pause_rounds, pause), Bound(_after_pause, pause))


def _pause_rounds(pause: Lasting, state: Any, live: jax.Array) -> jax.Array:
    return pause.rounds(state.control, live)


def _after_pause(pause: Lasting, state: Any, rounds: jax.Array) -> Any:
    return state.replace(control=pause.after(state.control, rounds))


def _rest(setup: _Setup, features: bool) -> Rest | None:
    """``Drafter.rest``: the rounds for which the controller's limit is 0."""
    controller = setup.plan.controller
    if controller is None or controller.limit is None:
        return None
    lasting = None
    # A lazy stepper begins with what it lacks.
    if setup.stepper.lazy and not features and controller.pause is not None:
        lasting = pausing(controller.pause)
    return Rest(Bound(_resting, controller), Bound(_idle, setup), lasting)


def _resting(controller: control.Controller, state: State) -> jax.Array:
    return jnp.asarray(control.longest(controller, state.control) == 0)


def _idle(
    setup: _Setup, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> State:
    del keys
    if setup.stepper.lazy:
        return state
    # The logits are not read, so they are not computed.
    return state.replace(kept=setup.stepper.begin(params, context, state.kept).kept)


def _init(
    setup: _Setup, params: ModelParams, context: Context, target_out: Output, slots: int
) -> State:
    kept = setup.stepper.init(params, context, target_out, slots)
    batch, controller = context.length.shape[0], setup.plan.controller
    state = State(kept, () if controller is None else controller.init(context))
    if not setup.stepper.keeps_block:
        return state
    growth = setup.plan.growth
    if isinstance(growth, Fixed):
        fed = sum(bool(children) for children in growth.shape.children[1:])
        return state.replace(block=_empty(setup, params, context, kept, fed))
    fed = sum(width for width, _ in growth.levels)
    places = jnp.full((batch, growth.nodes), -1, jnp.int32)
    return state.replace(block=_empty(setup, params, context, kept, fed), places=places)


def _empty(setup: _Setup, params: ModelParams, context: Context, kept: Any, fed: int) -> Any:
    """A block with room for ``fed`` nodes, and for the pending token if it has a place."""
    batch = context.length.shape[0]

    def one() -> tuple[Any, Any]:
        begun = setup.stepper.begin(params, context, kept)
        token, parent = jnp.zeros((batch, 1), jnp.int32), jnp.full((batch, 1), -1, jnp.int32)
        roots = 0 if begun.memory is None else 1
        nodes = Nodes(token, parent, 1, chain_layout(batch, 1, roots))
        memory = setup.stepper.step(params, growing.read_of(begun), nodes, begun.memory)[1]
        return begun.memory, memory

    # Only the shapes are needed.
    with jax.disable_jit(False):
        root, shapes = jax.eval_shape(one)
    places = fed if root is None else fed + 1
    return jax.tree.map(lambda x: jnp.zeros((batch, places, *x.shape[2:]), x.dtype), shapes)


def _room(places: int, memory: jax.Array) -> jax.Array:
    """Zeros for so many places like that of ``memory`` [B,1,...]."""
    return jnp.zeros((memory.shape[0], places, *memory.shape[2:]), memory.dtype)


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
        draft, places, block, rows = pool.grow(job, rows, growth)
    elif setup.is_chain and stepper.looped and growth.nodes > 1:
        room = state.block
        if room is None and begun.memory is not None:
            room = jax.tree.map(Bound(_room, growth.nodes), begun.memory)
        elif room is None:
            room = _empty(setup, params, context, state.kept, growth.nodes - 1)
        draft, block, rows = chain.grow(job, rows, growth.nodes, growth.how, room)
    else:
        draft, block, rows = levels.grow(job, rows, growth.shape, growth.how)
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
    setup: _Setup,
    params: ModelParams,
    state: State,
    draft: Draft,
    verdict: Verdict,
    target_out: Output,
) -> State:
    stepper, (_, controller) = setup
    drafted = _drafted(setup, state, verdict) if stepper.commits_block else None
    kept = stepper.commit(params, state.kept, drafted, verdict, target_out)
    own = state.control
    if controller is not None:
        new = controller.update(own, draft, verdict)
        own = new if controller.shared else growing.where_rows(verdict.count > 0, new, own)
    return state.replace(kept=kept, control=own)


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
    if isinstance(growth, Fixed):
        own, paths = levels.fed_places(growth.shape), levels.node_paths(growth.shape)
        if growth.siblings == IID:
            # Equal siblings: the path may pass from a leaf, never fed, to the children of a sibling
            # with the same token. The ancestors of its last node were all fed.
            steps = (path >= 0).sum(-1, keepdims=True)
            nodes = jnp.pad(path, ((0, 0), (1, 0)), constant_values=-1)
            last = jnp.take_along_axis(nodes, steps, 1)[:, 0]
            path = jnp.asarray(paths)[last + 1]
        places = jnp.asarray(own)[jnp.maximum(path, 0)]
    else:
        assert state.places is not None
        places = jnp.take_along_axis(state.places, jnp.maximum(path, 0), 1)
    places = jnp.where(path >= 0, places, -1)
    count = jnp.cumprod(places >= 0, -1).sum(-1)
    return Drafted(state.block, jnp.minimum(count, most).astype(jnp.int32), places)
