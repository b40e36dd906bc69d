"""Several small language models draft a tree each; together they are one tree below the pending token. L1 with the tree rules.

SpecInfer's merged trees (Miao et al. 2024, 2305.09781, sections 3 and 4), card 19. Every node is drawn from the law of its own
model, independently of the others, and says so: equal tokens of several models stay separate nodes and separate trials
(``recursive`` is the paper's multi-step speculative sampling). Rows at temperature 0 take the most probable tokens.

A rule may follow a path that leads over nodes of several models, or one that a model never proposed. Each model keeps in its
cache what its own draft had of the emitted text, and reads the rest in the next round.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax.drafters.draft_models import draft_tree
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.topology.shapes import Topology
from specjax.types import INDEPENDENT, LM, Draft, Drafter, ModelParams, Params, Verdict


def make(
    target: LM,
    *,
    models: Sequence[LM | str | os.PathLike] | str,
    tree: Topology | str | Sequence[int] = "chain:4",
    params: Sequence[Params] | None = None,
) -> Drafter:
    """Drafts with several small language models.

    Args:
        target: the model to be accelerated.
        models: the draft models: each an ``LM``, or a directory in Hugging Face layout; or the directories as one text,
            separated by commas.
        tree: the shape of each model's part, as ``topology.parse`` reads it.
        params: their parameters, where they are LMs.

    Raises:
        UserError: no model, not as many parameters as models, and what ``draft_tree`` raises for each.
    """
    shape = shapes.parse(tree)
    models = _several(models)
    given = [None] * len(models) if params is None else list(params)
    if len(given) != len(models):
        raise UserError(
            f"there are {len(models)} models and {len(given)} params; give one for each model"
        )
    # A model may have proposed none of the emitted tokens: it then lacks them all, and the pending one.
    behind = shape.depth + 1
    parts = [
        draft_tree.build("specinfer", target, model, shape, "iid", each, behind)
        for model, each in zip(models, given, strict=True)
    ]
    nodes, alone = shape.nodes * len(parts), parts[0].probs

    def of(params: ModelParams, i: int) -> ModelParams:
        return ModelParams(params.target, params.draft[i])

    def init(params, context, target_out, slots):
        own = slots - nodes + shape.nodes
        return tuple(
            part.init(of(params, i), context, target_out, own) for i, part in enumerate(parts)
        )

    def propose(params, keys, context, state):
        done = [
            part.propose(of(params, i), keys.inner(i), context, each)
            for i, (part, each) in enumerate(zip(parts, state, strict=True))
        ]
        drafts, state = zip(*done, strict=True)
        return drafts[0] if len(parts) == 1 else _merge(drafts, shape), state

    def update(params, state, draft, verdict, target_out):
        after = []
        for i, (part, each) in enumerate(zip(parts, state, strict=True)):
            here = slice(i * shape.nodes, (i + 1) * shape.nodes)
            path = _own_path(draft.tokens[:, here], draft.valid[:, here], verdict, shape)
            own = verdict.replace(path=path)
            after.append(part.update(of(params, i), each, draft, own, target_out))
        return tuple(after)

    return Drafter(
        init_params=lambda key: tuple(part.init_params(key) for part in parts),
        init=init,
        propose=propose,
        update=update,
        nodes=nodes,
        name="specinfer",
        # A draft token of one of several models has no law of its own: which model it is from depends on the place.
        probs=None
        if len(parts) > 1 or alone is None
        else lambda params, context: alone(of(params, 0), context),
        siblings=INDEPENDENT if len(parts) > 1 else parts[0].siblings,
        depth=shape.depth,
        gaps=False,
    )


def _several(models: Sequence[LM | str | os.PathLike] | str) -> Sequence[LM | str | os.PathLike]:
    """The draft models one by one. Raises UserError if there is none."""
    if isinstance(models, LM | os.PathLike):
        raise UserError(
            "models is one draft model; give a list of them, or directories separated by commas"
        )
    if not isinstance(models, str | Sequence):
        raise UserError(
            f"models is {models!r}; give a list of draft models, or directories separated by commas"
        )
    found = (
        [part.strip() for part in models.split(",")] if isinstance(models, str) else list(models)
    )
    if any(not isinstance(each, LM | str | os.PathLike) for each in found):
        raise UserError(
            "models has something that is neither an LM nor a directory; give draft models"
        )
    if not found or "" in found:
        raise UserError(
            "models has an empty place; give at least one draft model, directories separated by commas"
        )
    return found


def _parents(shape: Topology, batch: int, offset: int = 0) -> jax.Array:
    """i32[B,N], for nodes numbered from ``offset``."""
    parents = jnp.asarray(
        [parent + offset if parent >= 0 else -1 for parent in shape.parents], jnp.int32
    )
    return jnp.broadcast_to(parents, (batch, shape.nodes))


def _merge(drafts: Sequence[Draft], shape: Topology) -> Draft:
    """The drafts side by side below the pending token, the nodes of each in their order."""
    batch = drafts[0].tokens.shape[0]
    # A chain has no parents and no depth of its own; here it is a branch like any other.
    alike = [
        draft.replace(
            parents=_parents(shape, batch, i * shape.nodes), finite=None, depth=shape.depth
        )
        for i, draft in enumerate(drafts)
    ]
    finite = jax.tree.map(lambda *each: jnp.stack(each).all(0), *(draft.finite for draft in drafts))
    return jax.tree.map(lambda *each: jnp.concatenate(each, 1), *alike).replace(finite=finite)


def _own_path(tokens: jax.Array, valid: jax.Array, verdict: Verdict, shape: Topology) -> jax.Array:
    """The nodes of one model's draft (i32[B,N]) that spell as many of the emitted tokens as it has: i32[B,M], -1 padded.

    The last emitted token is the pending one of the next round and is left out.
    """
    depth, parents = jnp.asarray(shape.depths), _parents(shape, tokens.shape[0])
    said = (tokens == verdict.tokens[:, depth - 1]) & (depth < verdict.count[:, None])
    reach = jnp.where(tree_lib.exists(valid & said, parents), depth, 0)
    end = jnp.where(reach.max(-1) > 0, jnp.argmax(reach, -1), -1)
    return jnp.asarray(draft_tree.nodes_above(shape))[end + 1]
