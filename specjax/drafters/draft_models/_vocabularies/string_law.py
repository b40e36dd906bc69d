"""Drafts from the probability of each token's string: SLRS, string-level rejection sampling. L1.

Timor et al. 2025 (2502.05202). The weight of a target token is the probability that the draft model
writes its bytes, summed over all ways to write them in draft tokens. These weights, divided by
their sum, are the distribution that a token is drawn from and ``Draft.probs``, so that the ordinary
rule is exact. (The paper samples draft tokens and cuts them; a token's own string may also be the
beginning of a longer token's, so its weights have no sum of 1.)

The ways of all tokens are one tree of draft tokens, the same for every text: one pass over it after
each token gives all weights. This is for small draft vocabularies: bytes, or a few hundred tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree
from specjax.bound import Bound
from specjax.drafters.draft_models import _small_model
from specjax.drafters.draft_models._vocabularies import draft_text
from specjax.drafters.draft_models._vocabularies.draft_text import Kept, Reader
from specjax.drafters.draft_models._vocabularies.maps import Maps, Spellings
from specjax.drafters.growth import Begun, Nodes, Plan, Stepper
from specjax.sampling import log_probs
from specjax.topology.shapes import Topology
from specjax.types import LM, Array, Context, Drafter, ModelParams, Params

# The most nodes of the tree of spellings.
NODES = 2048


class _Setup(NamedTuple):
    """The static settings."""

    reader: Reader
    ways: Spellings
    inside: np.ndarray  # bool[N,N] whether a node sees another: its ancestors and itself
    depth: np.ndarray  # i32[N] draft tokens before the node's own
    size: int  # V


class _Memory(NamedTuple):
    """A node that was fed: the draft model's block of its draft tokens, and their number."""

    block: Any  # arrays [B,1,P,...]
    size: Array  # i32[B,1]


def build(size: int, model: LM, params: Params, maps: Maps, ways: Spellings, plan: Plan) -> Drafter:
    """The drafter of a chain; ``size`` is the number of the target's tokens."""
    nodes, pieces = plan.growth.nodes, maps.pieces.shape[1]
    inside, depth = _shape_of(ways.parents)
    ahead = nodes * pieces + int(depth.max(initial=0)) + 1
    reader = Reader(model, maps, ahead, min(nodes + pieces, _small_model.CATCH_UP))
    setup = _Setup(reader, ways, inside, depth, size)
    # The accepted tokens are read again: their draft tokens have other places in the block.
    stepper = Stepper(begin=Bound(_begin, setup), step=Bound(_step, setup))
    # Tokens beyond those that the last pass of ``begin`` takes are read by further ones.
    one_pass = (nodes + 1) * pieces <= reader.behind
    return draft_text.build(reader, stepper, plan, params, one_pass)


def _shape_of(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which nodes each node sees, bool[N,N], and how many are above it, i32[N]."""
    inside = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            inside[node] |= inside[parent]
    return inside, (inside.sum(1) - 1).astype(np.int32)


def _begin(setup: _Setup, params: ModelParams, context: Context, kept: Kept) -> Begun:
    begun = draft_text.begin(setup.reader, params, context, kept)
    batch, count = len(begun.logits), len(setup.ways.tokens)
    static = setup.inside, setup.depth
    inside, depth = (jnp.broadcast_to(x, (batch, *x.shape)) for x in static)
    layout = tree.Layout(inside, depth)
    after = begun.logits[:, None]
    if count:
        tokens = jnp.broadcast_to(setup.ways.tokens, (batch, count))
        out, _ = setup.reader.model.apply(params.draft, tokens, begun.kept.cache, layout)
        after = jnp.concatenate([after, out.logits], 1)
    return begun._replace(logits=weights(setup.ways, after, setup.size))


def _step(
    setup: _Setup, params: ModelParams, kept: Kept, nodes: Nodes, block: _Memory | None
) -> tuple[Array, _Memory]:
    """``Stepper.step`` of one node of a chain, in one pass: its draft tokens, then the tree."""
    maps, count = setup.reader.maps, len(setup.ways.tokens)
    batch, pieces = nodes.tokens.shape[0], maps.pieces.shape[1]
    own = jnp.take(jnp.asarray(maps.pieces), nodes.tokens[:, 0], axis=0, mode="clip")
    size = jnp.take(jnp.asarray(maps.sizes), nodes.tokens, mode="clip")  # [B,1]
    ways = jnp.broadcast_to(setup.ways.tokens, (batch, count))
    tokens = jnp.concatenate([jnp.maximum(own, 0), ways], 1)
    before, earlier = None, jnp.zeros((batch, 0), jnp.int32)
    if block is not None:
        before = jax.tree.map(lambda x: x.reshape(batch, -1, *x.shape[3:]), block.block)
        # Nodes that were not fed yet have no draft tokens.
        fed = jnp.arange(block.size.shape[1]) < nodes.depth - 1
        earlier = jnp.where(fed, block.size, 0)
    layout = _layout(setup, earlier, size, pieces)
    out, new = setup.reader.model.apply(params.draft, tokens, kept.cache, layout, before)
    last = jnp.take_along_axis(out.logits, size[..., None] - 1, 1)
    after = jnp.concatenate([last, out.logits[:, pieces:]], 1)
    memory = jax.tree.map(lambda x: x[:, None, :pieces], new)
    return weights(setup.ways, after, setup.size)[:, None], _Memory(memory, size)


def _layout(setup: _Setup, earlier: Array, size: Array, pieces: int) -> tree.Layout:
    """What a node's P draft tokens and the tree after them see, and their positions.

    ``earlier`` i32[B,F] and ``size`` i32[B,1] are numbers of draft tokens of the nodes before and
    of the node. The places are P for each of these, then the tree.
    """
    (batch, count), place = (size.shape[0], len(setup.ways.tokens)), np.arange(pieces)
    sizes = jnp.concatenate([earlier, size], 1)
    begins = jnp.cumsum(sizes, 1) - sizes
    filled = (place < sizes[..., None]).reshape(batch, -1)
    position = (begins[..., None] + place).reshape(batch, -1)
    total = sizes.sum(1)
    depth = jnp.concatenate([position, total[:, None] + setup.depth], 1)
    old = filled.shape[1] - pieces
    chain = np.concatenate([np.ones((pieces, old), bool), np.tri(pieces, dtype=bool)], 1)
    # A row of the mask must not be empty: an unused place attends to itself; nothing reads it.
    itself = np.concatenate([np.zeros((pieces, old), bool), np.eye(pieces, dtype=bool)], 1)
    own = filled[:, None] & chain | itself
    first = jnp.concatenate([own, jnp.zeros((batch, pieces, count), bool)], 2)
    seen = jnp.broadcast_to(filled[:, None], (batch, count, filled.shape[1]))
    inside = jnp.broadcast_to(setup.inside, (batch, count, count))
    second = jnp.concatenate([seen, inside], 2)
    return tree.Layout(jnp.concatenate([first, second], 1), depth.astype(jnp.int32))


def weights(ways: Spellings, logits: Array, size: int) -> Array:
    """f[B,V]: the log-probability of the string of each token; -inf: it cannot be written.

    ``logits`` f[B,N+1,W] after the text, and after each node.
    """
    scores = log_probs(logits)
    path = jnp.zeros_like(scores[:, :, 0])
    for level in map(np.array, Topology(tuple(ways.parents)).levels):
        parents = ways.parents[level] + 1
        path = path.at[:, level + 1].set(path[:, parents] + scores[:, parents, ways.tokens[level]])
    each = path[:, ways.sources + 1] + scores[:, ways.sources + 1, ways.last]
    highest = jnp.full((scores.shape[0], size), -jnp.inf, scores.dtype)
    highest = highest.at[:, ways.completes].max(each)
    shift = jnp.where(jnp.isfinite(highest), highest, 0)
    total = jnp.zeros_like(highest)
    total = total.at[:, ways.completes].add(jnp.exp(each - shift[:, ways.completes]))
    # A NaN stays one, and the draft is then reported as not finite.
    none = total == 0
    return jnp.where(none, -jnp.inf, jnp.log(jnp.where(none, 1, total)) + shift)
