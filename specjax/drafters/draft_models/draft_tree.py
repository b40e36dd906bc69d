"""A smaller language model drafts a tree of a fixed shape, level by level. L1 with the tree rules.

The siblings of a node are drawn in one of three ways, and the rule must fit (``accept.check_pair`` sees to it):

- "without_replacement" (Gumbel top-k): Sequoia (Chen et al. 2024, 2402.12374) and RSD-C (Jeon et al. 2024, 2402.14160);
- "iid": SpecInfer's expansion (Miao et al. 2024, 2305.09781) and, as "chains:KxL", SpecTr (Sun et al. 2023, 2310.15141);
- "top_k": the most probable tokens, a deterministic tree.

Rows at temperature 0 always take the most probable tokens. Each level is one pass of the draft model over the nodes that have
children; the leaves are never fed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specjax.checks import one_of
from specjax.drafters import _growth
from specjax.drafters.draft_models import _small_model
from specjax.topology import shapes
from specjax.topology.shapes import Topology
from specjax.types import CHAIN, LM, Drafter, Params

BEHIND = 2  # tokens that the draft cache may lack: the pending one, and the last accepted node if it is a leaf


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
        tree: its shape, as ``topology.parse`` reads it: "4x2x1" (children per level), "chains:4x5", a .json file.
        siblings: "without_replacement", "iid" or "top_k".
        params: the draft model's parameters when ``model`` is an ``LM``.

    Raises:
        UserError: a shape that is none, more siblings than the vocabulary has tokens, another vocabulary than the target's.
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
    """``make`` for drafters that are made of it: ``behind`` is how many committed tokens the draft cache may lack.

    Its ``update`` reads of a verdict whether ``count`` is positive, and the last node of ``path``.
    """
    one_of("siblings", siblings, tuple(_growth.KINDS))
    shape = shapes.check(shapes.parse(tree).parents, target.vocab_size)
    model, params = _small_model.load(target, model, params)
    inner = [node for level in shape.levels for node in level if shape.children[node + 1]]
    fed = np.full(
        shape.nodes, -1, np.int32
    )  # a node's place in the draft model's block, the root not counted
    fed[inner] = np.arange(len(inner))
    block = np.array(
        [-1, *(fed[shape.parents[node]] + 1 if shape.parents[node] >= 0 else 0 for node in inner)],
        np.int32,
    )
    paths = nodes_above(shape)
    places = np.where(paths >= 0, fed[np.maximum(paths, 0)], -1)
    kind = CHAIN if shape.branching == 1 and siblings != "top_k" else _growth.KINDS[siblings]

    def init(params, context, target_out, slots):
        _small_model.check_positions(model, slots, shape.nodes)
        return _small_model.begin(model, params.draft, context, slots + behind + len(inner))

    def propose(params, keys, context, cache):
        def expand(cache, level, nodes, tokens):
            if level == 0:
                logits, cache = _small_model.catch_up(model, params.draft, context, cache, behind)
                return logits[:, None], np.zeros(1, int), cache
            size = int(fed[nodes].max()) + 2  # the block so far, its root included
            grown = jnp.broadcast_to(jnp.asarray(block[:size]), (tokens.shape[0], size))
            out, cache = model.apply(params.draft, tokens, cache, grown)
            return out.logits, np.arange(len(nodes)), cache

        return _growth.grow(keys, context, shape, siblings, kind, cache, expand)

    def update(params, cache, draft, verdict, target_out):
        # What is kept is the path to the last node. The verdict's own may lead over a copy of a sibling that was never fed.
        steps = (verdict.path >= 0).sum(-1, keepdims=True)
        last = jnp.take_along_axis(
            jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1), steps, 1
        )[:, 0]
        path = jnp.asarray(places)[last + 1]
        kept = jnp.where(verdict.count > 0, 1 + (path >= 0).sum(-1), 0)
        return model.commit(cache, kept, path)

    return Drafter(
        init_params=lambda key: _small_model.given(name, params),
        init=init,
        propose=propose,
        update=update,
        nodes=shape.nodes,
        name=name,
        probs=lambda params, context: _small_model.probs(model, params.draft, context),
        siblings=kind,
        depth=shape.depth,
        gaps=False,
    )


def nodes_above(shape: Topology) -> np.ndarray:
    """i32[N+1,depth]: the nodes on the way to the pending token (entry 0: none) and to node i (entry i + 1), -1 padded."""
    paths = np.full((shape.nodes + 1, shape.depth), -1, np.int32)
    for node, (parent, depth) in enumerate(zip(shape.parents, shape.depths, strict=True)):
        paths[node + 1] = paths[parent + 1]
        paths[node + 1, depth - 1] = node
    return paths
