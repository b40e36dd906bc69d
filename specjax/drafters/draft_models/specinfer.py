"""Several small language models draft a tree each; together they are one tree. L1 with tree rules.

SpecInfer's merged trees (Miao et al. 2024, 2305.09781, sections 3 and 4). Every node is drawn from
its model's probabilities, independently of the other models, and ``Draft.probs`` holds these. Nodes
of several models with equal paths are scored once, and rules test each (``recursive`` is the
paper's multi-step speculative sampling). Siblings are tested in the order of the models, or as in
the paper in a random order (``sibling_order``). Rows at temperature 0 take the most probable
tokens.

The accepted path may contain nodes of several models, so a model may have proposed only a part of
it. Each model keeps in its cache the part of the emitted text that its own draft has, and is fed
the rest in the next round.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import control as controllers
from specjax import declare
from specjax import tree as tree_lib
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters.draft_models import _small_model
from specjax.drafters.growth import Fixed, Plan
from specjax.drafters.growth.levels import node_paths
from specjax.drafters.nested import _stages
from specjax.errors import UserError
from specjax.rng import DRAFT, RowKeys
from specjax.topology import shapes
from specjax.topology.shapes import Topology
from specjax.types import (
    INDEPENDENT,
    LM,
    Array,
    Context,
    Draft,
    Drafter,
    Lasting,
    ModelParams,
    Output,
    Params,
    Rest,
    Verdict,
)

REFERENCE = "miao2024specinfer"


class _Setup(NamedTuple):
    """The static settings."""

    parts: Sequence[Drafter]  # one per model
    shape: Topology  # of each part
    mixed: bool  # whether the nodes of a level are in a random order


class State(struct.PyTreeNode):
    """What is carried from round to round."""

    parts: tuple[Any, ...]  # of each model
    order: Array | None = None  # i32[B,N] with a random order: the node at each place


class Keys(declare.Keys):
    """The keys of ``specinfer``."""

    LENGTH = "tree"

    models: Sequence[LM | str | os.PathLike] | str = key(
        help="the draft models: each an ``LM``, or any model that ``hf.load`` takes; or the "
        "directories as one text, separated by commas"
    )
    tree: Topology | str | Sequence[int] = key(
        "chain:4", "the shape of each model's part, as ``topology.shapes.parse`` reads it"
    )
    control: str | controllers.Controller = key("", "ends a part early; see ``control.parse``")
    sibling_order: str = key(
        "models",
        'in which siblings are tested: "models" (one after the other) or "random"',
        choices=("models", "random"),
    )
    params: Sequence[Params] | None = key(None, "their parameters, when they are LMs", python=True)


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with several small language models.

    Raises:
        UserError: no model, not as many parameters as models, an unknown order, and the errors of
            ``draft_tree`` for each model.
    """
    shape, models = shapes.parse(keys.tree), list_of(keys.models)
    # A model may have proposed none of the emitted tokens: it then lacks all of them, and the
    # pending one.
    behind = shape.depth + 1
    shape = shapes.check(shape.parents, target.vocab_size)
    plan = Plan(Fixed(shape, "iid"), controllers.parse(keys.control))
    loaded = _small_model.load_all(target, models, keys.params)
    built = (_small_model.build("specinfer", *each, plan, behind=behind) for each in loaded)
    parts = [_stages.with_params(part, i) for i, part in enumerate(built)]
    setup = _Setup(parts, shape, keys.sibling_order == "random" and shape.nodes * len(parts) > 1)
    return parts[0]._replace(
        init_params=Bound(_init_params, setup),
        init=Bound(_init, setup),
        propose=Bound(_propose, setup),
        update=Bound(_update, setup),
        nodes=shape.nodes * len(parts),
        # With several models the distribution of a draft token depends on its node, not on the
        # prefix alone.
        probs=parts[0].probs if len(parts) == 1 else None,
        siblings=INDEPENDENT if len(parts) > 1 else parts[0].siblings,
        rare=parts[0].rare._replace(merges=len(parts), rest=_rest(parts), sizes=()),
    )


def _rest(parts: Sequence[Drafter]) -> Rest | None:
    """``Rare.rest``: a row rests where all models do, until one of them may draft."""
    # All have the same controller.
    rests = [rest for part in parts if (rest := part.rare.rest)]
    if not rests:
        return None
    known = [rest.lasting for rest in rests if rest.lasting]

    def rows(state: State) -> Array:
        return jnp.stack([rest.rows(own) for rest, own in _each(rests, state)]).all(0)

    def idle(params: ModelParams, keys: RowKeys, context: Context, state: State) -> State:
        parts = (rest.idle(params, keys, context, own) for rest, own in _each(rests, state))
        return state.replace(parts=tuple(parts))

    def rounds(state: State, live: Array) -> Array:
        return jnp.stack([own.rounds(part, live) for own, part in _each(known, state)]).min(0)

    def after(state: State, rounds: Array) -> State:
        parts = tuple(own.after(part, rounds) for own, part in _each(known, state))
        return state.replace(parts=parts)

    return Rest(rows, idle, Lasting(rounds, after) if known else None)


def _each(values: Sequence[Any], state: State) -> Iterator[tuple[Any, Any]]:
    return zip(values, state.parts, strict=True)


def list_of(models: Sequence[LM | str | os.PathLike] | str) -> list[LM | str | os.PathLike]:
    """The models of the key ``models``, one entry each. Raises UserError for an empty list."""
    entries: Any = [*map(str.strip, models.split(","))] if isinstance(models, str) else models
    several = isinstance(entries, Sequence) and not isinstance(entries, LM)  # an LM is a tuple
    if not several or not all(isinstance(each, LM | str | os.PathLike) for each in entries):
        raise UserError(
            f"models is {models!r:.60}; give a list of draft models, or directories separated by "
            "commas"
        )
    if not entries or "" in entries:
        raise UserError("models has an empty entry; give at least one draft model, and no others")
    return list(entries)


def _init_params(setup: _Setup, key: Any) -> tuple[Params, ...]:
    return tuple(part.init_params(key) for part in setup.parts)


def _init(setup: _Setup, params: ModelParams, context: Context, out: Output, slots: int) -> State:
    size = setup.shape.nodes * len(setup.parts)
    # As many slots as each model would have alone.
    slots = slots - size + setup.shape.nodes
    parts = tuple(part.init(params, context, out, slots) for part in setup.parts)
    every = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (len(context.length), size))
    return State(parts, every if setup.mixed else None)


def _propose(
    setup: _Setup, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> tuple[Draft, State]:
    every = enumerate(_each(setup.parts, state))
    pairs = [part.propose(params, keys.inner(i), context, own) for i, (part, own) in every]
    drafts, parts = zip(*pairs, strict=True)
    draft = drafts[0] if len(drafts) == 1 else _merge(drafts, setup.shape)
    if not setup.mixed:
        return draft, State(parts)
    if draft.parents is None:  # a chain has no siblings
        return draft, State(parts, state.order)
    firsts = range(0, len(parts) * setup.shape.nodes, setup.shape.nodes)
    levels = [[first + node for first in firsts for node in level] for level in setup.shape.levels]
    draft, order = shuffled(keys.inner(len(parts)), draft, levels)
    return draft, State(parts, order)


def _update(
    setup: _Setup, params: ModelParams, state: State, draft: Draft, verdict: Verdict, out: Output
) -> State:
    after, shape = [], setup.shape
    # The round may have verified the first nodes only.
    more = ((0, 0), (0, shape.nodes * len(setup.parts) - draft.tokens.shape[1]))
    tokens, valid = jnp.pad(draft.tokens, more), jnp.pad(draft.valid, more)
    if state.order is not None:
        tokens, valid = (restored(x, state.order) for x in (tokens, valid))
    for i, (part, each) in enumerate(_each(setup.parts, state)):
        here = slice(i * shape.nodes, (i + 1) * shape.nodes)
        mine = Draft(tokens[:, here], valid[:, here], _parents(shape, len(tokens)))
        own = verdict.replace(path=_own_path(mine, verdict, shape))
        after.append(part.update(params, each, mine, own, out))
    return State(tuple(after), state.order)


def _parents(shape: Topology, batch: int, offset: int = 0) -> Array:
    """i32[B,N], for nodes numbered from ``offset``."""
    parents = np.array(shape.parents, np.int32)
    return jnp.broadcast_to(np.where(parents < 0, -1, parents + offset), (batch, shape.nodes))


def _merge(drafts: Sequence[Draft], shape: Topology) -> Draft:
    """The drafts as one tree below the pending token; the nodes of each keep their order."""
    # The draft of a chain has no parents; in the merged tree it is a branch.
    size, batch = shape.nodes, len(drafts[0].tokens)
    parts = [
        draft.replace(parents=_parents(shape, batch, i * size), finite=None, depth=shape.depth)
        for i, draft in enumerate(drafts)
    ]
    finite = jax.tree.map(lambda *each: jnp.stack(each).all(0), *(draft.finite for draft in drafts))
    return tree_lib.join(*parts).replace(finite=finite)


def _own_path(draft: Draft, verdict: Verdict, shape: Topology) -> Array:
    """i32[B,M], -1 padded: the longest path in one model's draft whose tokens were emitted.

    The last emitted token is the pending one of the next round and is left out.
    """
    depth = jnp.asarray(shape.depths)
    emitted = (draft.tokens == verdict.tokens[:, depth - 1]) & (depth < verdict.count[:, None])
    reach = jnp.where(tree_lib.exists(draft.valid & emitted, draft.parents), depth, 0)
    end = jnp.where(reach.max(-1) > 0, jnp.argmax(reach, -1), -1)
    return jnp.asarray(node_paths(shape))[end + 1]


def shuffled(keys: RowKeys, draft: Draft, levels: Sequence[Sequence[int]]) -> tuple[Draft, Array]:
    """The draft with the nodes of each level in a random order, per row.

    ``levels`` are the numbers of the nodes by depth. Returns the draft, and i32[B,N]: which node is
    now at each place.
    """
    parts, batch = [], len(draft.tokens)
    for depth, level in enumerate(levels):
        weights = jnp.ones((batch, len(level)), jnp.result_type(float))
        places = keys.draw_distinct(DRAFT, weights, len(level), depth)[0]
        parts.append(jnp.asarray(np.array(level), jnp.int32)[places])
    order = jnp.concatenate(parts, 1)
    return tree_lib.reordered(draft, order), order


def restored(values: Array, order: Array) -> Array:
    """[B,N] values of the places, as values of the nodes; ``order`` of ``shuffled``."""
    return jnp.take_along_axis(values, jnp.argsort(order, 1), 1)
