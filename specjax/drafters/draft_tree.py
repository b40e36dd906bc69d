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

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling, topology
from specjax.drafters import _small_model
from specjax.drafters._checks import one_of, positions
from specjax.rng import DRAFT
from specjax.topology import Topology
from specjax.types import CHAIN, DETERMINISTIC, IID, LM, WITHOUT_REPLACEMENT, Context, Draft, Drafter, Params

KINDS = {"without_replacement": WITHOUT_REPLACEMENT, "iid": IID, "top_k": DETERMINISTIC}
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
    one_of("siblings", siblings, tuple(KINDS))
    shape = topology.check(topology.parse(tree).parents, target.vocab_size)
    model, params = _small_model.load(target, model, params)
    inner = [node for level in shape.levels for node in level if shape.children[node + 1]]
    fed = np.full(shape.nodes, -1, np.int32)  # a node's place in the draft model's block, the root not counted
    fed[inner] = np.arange(len(inner))
    block = np.array(
        [-1, *(fed[shape.parents[node]] + 1 if shape.parents[node] >= 0 else 0 for node in inner)], np.int32
    )
    paths = nodes_above(shape)
    places = np.where(paths >= 0, fed[np.maximum(paths, 0)], -1)
    kind = CHAIN if shape.branching == 1 and siblings != "top_k" else KINDS[siblings]

    def init(params, context, target_out, slots):
        positions(model, slots, shape.nodes)
        return _small_model.begin(model, params.draft, context, slots + behind + len(inner))

    def propose(params, keys, context, cache):
        batch = context.length.shape[0]
        logits, cache = _small_model.catch_up(model, params.draft, context, cache, behind)
        logits, expanding, done = logits[:, None], [-1], 1
        levels, order, finite = [], [], jnp.ones((batch,), bool)
        for level in shape.levels:
            finite &= jnp.isfinite(logits.max(-1)).all(-1)
            levels.append(_children(keys, context, logits, expanding, shape, siblings))
            order += level
            tokens = jnp.concatenate([each.tokens for each in levels], 1)
            expanding = [node for node in level if shape.children[node + 1]]
            if expanding:
                done += len(expanding)
                grown = jnp.broadcast_to(jnp.asarray(block[:done]), (batch, done))
                new = tokens[:, np.array([order.index(node) for node in expanding])]
                out, cache = model.apply(params.draft, new, cache, grown)
                logits = out.logits
        back = np.argsort(np.array(order))
        draft = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1)[:, back], *levels)
        parents = jnp.broadcast_to(jnp.asarray(shape.parents, jnp.int32), (batch, shape.nodes))
        return draft.replace(parents=None if kind == CHAIN else parents, finite=finite, depth=shape.depth), cache

    def update(params, cache, draft, verdict, target_out):
        # What is kept is the path to the last node. The verdict's own may lead over a copy of a sibling that was never fed.
        steps = (verdict.path >= 0).sum(-1, keepdims=True)
        last = jnp.take_along_axis(jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1), steps, 1)[:, 0]
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
        law=lambda params, context: _small_model.law(model, params.draft, context),
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


def _children(keys, context: Context, logits, expanding: list[int], shape: Topology, siblings: str) -> Draft:
    """The children of the nodes ``expanding``, whose logits are f32[B,n,V], in the order of the level."""
    of = {node: i for i, node in enumerate(expanding)}
    level = [child for node in expanding for child in shape.children[node + 1]]
    level.sort()
    parent = np.array([of[shape.parents[node]] for node in level])
    rank = np.array([shape.ranks[node] for node in level])
    most = int(rank.max()) + 1
    best = sampling.top(logits, most)[1][:, parent, rank]
    always = jnp.ones_like(best, bool)
    if siblings == "top_k":
        return Draft(best, always)

    def sampled():
        laws = sampling.to_probs(logits, context.sampling)
        greedy = context.sampling.greedy[:, None]
        if siblings == "iid":
            tokens, real = keys.draw(DRAFT, laws[:, parent], jnp.asarray(level)), always
            laws = laws[:, parent]
        else:
            drawn, exist = keys.draw_distinct(DRAFT, laws, most, jnp.asarray(expanding) + 1)
            tokens, real = drawn[:, parent, rank], exist[:, parent, rank]
            laws = _conditional(laws, drawn)[:, parent, rank]
        return jnp.where(greedy, best, tokens), greedy | real, laws

    def greedy():
        return best, always, jnp.zeros((*best.shape, logits.shape[-1]), sampling.dtype_of(logits))

    tokens, valid, probs = jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled)
    return Draft(tokens, valid, probs=probs)


def _conditional(laws: jax.Array, drawn: jax.Array) -> jax.Array:
    """laws f[B,n,V] and the tokens i32[B,n,k] drawn without replacement -> the law of each, given those before: [B,n,k,V]."""
    out = [laws]
    for rank in range(drawn.shape[-1] - 1):
        left = jnp.where(jnp.arange(laws.shape[-1]) == drawn[..., rank, None], 0, out[-1])
        total = left.sum(-1, keepdims=True)
        out.append(left / jnp.where(total > 0, total, 1))
    return jnp.stack(out, 2)
