"""The drafter of a family of heads: the functions of a round, and the training part."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.checks import one_of
from specjax.drafters import _growth
from specjax.drafters._keys import HeadKeys, TreeKeys
from specjax.drafters.heads import _loss, _prefix, _text
from specjax.drafters.heads._family import Heads
from specjax.drafters.heads._given import Given
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.topology import search as tree_search
from specjax.topology import shapes
from specjax.topology.shapes import Topology
from specjax.types import (
    CHAIN,
    LM,
    Context,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Params,
    Training,
    Verdict,
)

SEARCHES = {"optimal": tree_search.optimal, "greedy": tree_search.greedy}


class State(struct.PyTreeNode):
    """What is carried from round to round."""

    # [B,E] feature of the token before the pending one; with a prefix, what the prefix makes of it.
    feature: jax.Array
    # bool[B] False: there is no feature yet, because the prompt has one token only.
    known: jax.Array
    # The prefix's cache.
    cache: Any = None


class _Setup(NamedTuple):
    """The static settings."""

    heads: Heads
    shape: Topology
    siblings: str
    kind: str


def build(target: LM, heads: Heads, keys: HeadKeys, given: Given) -> Drafter:
    """The drafter of these heads: chains or trees, deterministic ("top_k") or sampled.

    L1 with a rule that takes its siblings. Raises UserError for a tree deeper than there are heads,
    and for a search without measured accuracies.
    """
    one_of("siblings", keys.siblings, tuple(_growth.KINDS))
    # accuracy f64[K,W]: how often the token at depth d was the choice of rank r of head d.
    shape = _shape(heads, keys, given.config.get("accuracy"), target.vocab_size)
    kind = CHAIN if shape.branching == 1 else _growth.KINDS[keys.siblings]
    setup = _Setup(heads, shape, keys.siblings, kind)
    return Drafter(
        init_params=functools.partial(_init_params, heads.name, given.params),
        init=functools.partial(_init, setup),
        propose=functools.partial(_propose, setup),
        update=functools.partial(_update, setup),
        nodes=shape.nodes,
        name=heads.name,
        siblings=kind,
        depth=shape.depth,
        features=True,
        gaps=False,
        training=_training(target, setup),
    )


def _training(target: LM, setup: _Setup) -> Training:
    heads, shape, siblings, kind = setup
    foresee = None
    if siblings == "top_k":
        foresee = functools.partial(_text.foresee_tree, heads, target, shape)
    elif kind == CHAIN:
        foresee = functools.partial(_text.foresee_chain, heads, target, shape.depth)
    return Training(
        loss=functools.partial(_loss.loss, heads, target),
        start=heads.start,
        foresee=foresee,
        ranks=functools.partial(_text.ranks, heads, target),
        facts=heads.facts,
    )


def _shape(heads: Heads, keys: TreeKeys, accuracy: Any, vocab_size: int) -> Topology:
    """The draft's shape. Raises UserError."""
    one_of("search", keys.search, tuple(SEARCHES))
    if keys.tree and keys.nodes:
        raise UserError(f"{heads.name} was given a tree and nodes={keys.nodes}; give one of them")
    if keys.search != "optimal" and not keys.nodes:
        raise UserError(
            f"search is {keys.search!r}, and no tree is searched for; give nodes, the size of a "
            "tree, or leave search out"
        )
    if keys.nodes:
        if accuracy is None:
            raise UserError(
                f"{heads.name} has no measured accuracies to search a tree of {keys.nodes} nodes "
                "with; give tree, or train the heads with specjax"
            )
        branching = min(tree_search.acceptance_table(accuracy).shape[1], vocab_size)
        shape, _ = SEARCHES[keys.search](accuracy, keys.nodes, heads.depth, branching)
    else:
        shape = shapes.parse(keys.tree) if keys.tree else shapes.chain(heads.depth)
    shape = shapes.check(shape.parents, vocab_size)
    if shape.depth > heads.depth:
        raise UserError(
            f"the tree is {shape.depth} levels deep and {heads.name} has {heads.depth} heads; "
            "take a flatter one"
        )
    return shape


def _init_params(name: str, params: Params, key: Any) -> Params:
    del key
    if params is None:
        raise UserError(
            f"{name} has no heads yet; give model=, a directory of trained ones (mode train makes "
            "them)"
        )
    return params


def _init(
    setup: _Setup, params: ModelParams, context: Context, target_out: Output, slots: int
) -> State:
    batch, size = target_out.hidden.shape[:2]
    count = context.length - 1
    features, cache, prefix = target_out.hidden, None, setup.heads.prefix
    if prefix is not None:
        cache = prefix.init_cache(batch, slots)
        if size:
            features, cache = _prefix.feed(prefix, params, features, count, cache)
    if not size:
        return State(jnp.zeros((batch, features.shape[-1]), features.dtype), count > 0, cache)
    return State(_at(features, jnp.maximum(count - 1, 0)), count > 0, cache)


def _propose(
    setup: _Setup, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> tuple[Draft, State]:
    inner = setup.heads.begin(params, state.feature[:, None])
    expand = functools.partial(_expand, setup.heads, setup.shape, params)
    draft, _ = _growth.grow(keys, context, setup.shape, setup.siblings, setup.kind, inner, expand)
    # A row without a feature drafts nothing; its logits may be non-finite.
    finite = None if draft.finite is None else draft.finite | ~state.known
    return draft.replace(valid=draft.valid & state.known[:, None], finite=finite), state


def _expand(
    heads: Heads,
    shape: Topology,
    params: ModelParams,
    inner: Any,
    level: int,
    nodes: list[int],
    tokens: jax.Array,
) -> tuple[jax.Array, np.ndarray, Any]:
    """``_growth.Expand``: the heads of one depth; ``inner`` is their state at the last level."""
    if heads.independent:
        logits, inner = heads.step(params, inner, level, tokens[:, :1])
        return logits, np.zeros(len(nodes), int), inner
    if level:
        # A node continues from the state of its parent.
        above = _parents_in_level(shape, nodes)
        inner = jax.tree.map(lambda x: x[:, above], inner)
    logits, inner = heads.step(params, inner, level, tokens)
    return logits, np.arange(len(nodes)), inner


def _parents_in_level(shape: Topology, nodes: list[int]) -> np.ndarray:
    """The index of each node's parent among the nodes of the level above that have children."""
    depth = shape.depths[nodes[0]]
    above = [-1]
    if depth > 1:
        above = [node for node in shape.levels[depth - 2] if shape.children[node + 1]]
    return np.array([above.index(shape.parents[node]) for node in nodes])


def _update(
    setup: _Setup,
    params: ModelParams,
    state: State,
    draft: Draft,
    verdict: Verdict,
    target_out: Output,
) -> State:
    # The last committed token that the target was fed: the pending token or an accepted node, the
    # one before the newest token.
    last = jnp.maximum(verdict.count - 1, 0)
    block = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    cache, prefix = state.cache, setup.heads.prefix
    if prefix is None:
        feature = _at(target_out.hidden, jnp.take_along_axis(block, last[:, None], 1)[:, 0])
    else:
        features = jnp.take_along_axis(target_out.hidden, jnp.maximum(block, 0)[..., None], 1)
        features, cache = prefix.apply(params, features, cache, None)
        cache = prefix.commit(cache, verdict.count)
        feature = _at(features, last)
    alive = verdict.count > 0
    return State(jnp.where(alive[:, None], feature, state.feature), state.known | alive, cache)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values [B,T,E], index i32[B] -> [B,E]."""
    return jnp.take_along_axis(values, index[:, None, None], 1)[:, 0]
