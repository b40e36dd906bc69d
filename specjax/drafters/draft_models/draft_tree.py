"""A smaller language model drafts a tree of a fixed shape, level by level. L1 with the tree rules.

The siblings of a node are drawn in one of three ways, and the rule must take them
(``accept.check_pair`` tests it):

- "without_replacement" (Gumbel top-k): Sequoia (Chen et al. 2024, 2402.12374) and RSD-C (Jeon et
  al. 2024, 2402.14160);
- "iid": SpecInfer's expansion (Miao et al. 2024, 2305.09781) and, as "chains:KxL", SpecTr (Sun et
  al. 2023, 2310.15141);
- "top_k": the most probable tokens, a deterministic tree.

Rows at temperature 0 always take the most probable tokens. Each level is one pass of the draft
model over the nodes that have children; leaves are never fed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import one_of
from specjax.drafters import _growth
from specjax.drafters.draft_models import _small_model
from specjax.rng import RowKeys
from specjax.topology import shapes
from specjax.topology.shapes import Topology
from specjax.types import CHAIN, LM, Context, Draft, Drafter, ModelParams, Output, Params, Verdict

# Tokens that the draft cache may lack: the pending one, and the last accepted node if it is a leaf.
BEHIND = 2


class _Block(NamedTuple):
    """The nodes that the draft model is fed: those that have children, level by level."""

    size: int  # how many
    places: np.ndarray  # i32[N] place of a node in the block, the root not counted; -1: a leaf
    parents: np.ndarray  # i32[size+1] place of the parent, the root counted; -1: the root itself
    paths: np.ndarray  # i32[N+1,depth] places on the path to the root (entry 0) and to node i (i+1)


class _Setup(NamedTuple):
    """The static settings."""

    model: LM
    shape: Topology
    siblings: str
    kind: str
    behind: int
    block: _Block


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    tree: Topology | str | Sequence[int] = "4x2x1",
    siblings: str = "without_replacement",
    params: Params = None,
) -> Drafter:
    """Drafts a tree with a small language model.

    Args:
        target: the model to be accelerated.
        model: the draft model: an ``LM``, or a directory in Hugging Face layout.
        tree: its shape, as ``topology.shapes.parse`` reads it: "4x2x1" (children per level),
            "chains:4x5", a .json file.
        siblings: "without_replacement", "iid" or "top_k".
        params: the draft model's parameters when ``model`` is an ``LM``.

    Raises:
        UserError: not a tree shape, more siblings than the vocabulary has tokens, another
            vocabulary than the target's.
    """
    return build("draft_tree", target, model, tree, siblings, params, BEHIND)


def build(
    name: str,
    target: LM,
    model: LM | str | os.PathLike,
    tree: Topology | str | Sequence[int],
    siblings: str,
    params: Params,
    behind: int,
) -> Drafter:
    """``make`` for drafters that contain this one.

    ``behind`` is the largest number of committed tokens that the draft cache may lack. ``update``
    reads of a verdict only whether ``count`` is positive, and the last node of ``path``.
    """
    one_of("siblings", siblings, tuple(_growth.KINDS))
    shape = shapes.check(shapes.parse(tree).parents, target.vocab_size)
    model, params = _small_model.load(target, model, params)
    kind = CHAIN if shape.branching == 1 and siblings != "top_k" else _growth.KINDS[siblings]
    setup = _Setup(model, shape, siblings, kind, behind, _block(shape))
    return Drafter(
        init_params=functools.partial(_small_model.init_params, name, params),
        init=functools.partial(_init, setup),
        propose=functools.partial(_propose, setup),
        update=functools.partial(_update, setup),
        nodes=shape.nodes,
        name=name,
        probs=functools.partial(_small_model.probs, model),
        siblings=kind,
        depth=shape.depth,
        gaps=False,
    )


def _block(shape: Topology) -> _Block:
    inner = [node for level in shape.levels for node in level if shape.children[node + 1]]
    places = np.full(shape.nodes, -1, np.int32)
    places[inner] = np.arange(len(inner))
    above = [shape.parents[node] for node in inner]
    parents = np.array([-1, *(places[p] + 1 if p >= 0 else 0 for p in above)], np.int32)
    paths = node_paths(shape)
    return _Block(
        len(inner), places, parents, np.where(paths >= 0, places[np.maximum(paths, 0)], -1)
    )


def _init(
    setup: _Setup, params: ModelParams, context: Context, target_out: Output, slots: int
) -> Any:
    _small_model.check_positions(setup.model, slots, setup.shape.nodes)
    slots += setup.behind + setup.block.size
    return _small_model.prefill(setup.model, params.draft, context, slots)


def _propose(
    setup: _Setup, params: ModelParams, keys: RowKeys, context: Context, cache: Any
) -> tuple[Draft, Any]:
    expand = functools.partial(_expand, setup, params, context)
    return _growth.grow(keys, context, setup.shape, setup.siblings, setup.kind, cache, expand)


def _expand(
    setup: _Setup,
    params: ModelParams,
    context: Context,
    cache: Any,
    level: int,
    nodes: list[int],
    tokens: jax.Array,
) -> tuple[jax.Array, np.ndarray, Any]:
    """``_growth.Expand``: one pass of the draft model; the state is its cache."""
    model, block = setup.model, setup.block
    if level == 0:
        logits, cache = _small_model.catch_up(model, params.draft, context, cache, setup.behind)
        return logits[:, None], np.zeros(1, int), cache
    # The size of the block after this level, the root counted.
    size = int(block.places[nodes].max()) + 2
    grown = jnp.broadcast_to(jnp.asarray(block.parents[:size]), (tokens.shape[0], size))
    out, cache = model.apply(params.draft, tokens, cache, grown)
    return out.logits, np.arange(len(nodes)), cache


def _update(
    setup: _Setup,
    params: ModelParams,
    cache: Any,
    draft: Draft,
    verdict: Verdict,
    target_out: Output,
) -> Any:
    # Keep the path to the last accepted node. The verdict's own path may contain a leaf, never fed,
    # in the place of a sibling with the same token.
    steps = (verdict.path >= 0).sum(-1, keepdims=True)
    nodes = jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1)
    last = jnp.take_along_axis(nodes, steps, 1)[:, 0]
    path = jnp.asarray(setup.block.paths)[last + 1]
    kept = jnp.where(verdict.count > 0, 1 + (path >= 0).sum(-1), 0)
    return setup.model.commit(cache, kept, path)


def node_paths(shape: Topology) -> np.ndarray:
    """i32[N+1,depth], -1 padded: the nodes on the way to node i in entry i + 1; entry 0 is empty.

    Entry 0 is the pending token's.
    """
    paths = np.full((shape.nodes + 1, shape.depth), -1, np.int32)
    for node, (parent, depth) in enumerate(zip(shape.parents, shape.depths, strict=True)):
        paths[node + 1] = paths[parent + 1]
        paths[node + 1, depth - 1] = node
    return paths
