"""Heads along a text: their logits, the labels, and which drafts would have been accepted.

The feature at position s of T predicts, at depth d from 0, tokens[s+2+d]: tokens[s+1] is the
pending token, drawn from f[s].

``foresee_chain``, ``foresee_tree`` and ``ranks`` take a function ``along(params, batch, depth)``
that gives for each depth the labels i32[B,T], and the logits of the drafter and of the target
f[B,T,V]; entry s belongs to feature s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from specjax import tree
from specjax.bound import Bound
from specjax.drafters import _foresee
from specjax.drafters._growth import Fixed, Plan
from specjax.drafters.heads._family import Heads
from specjax.models import lm
from specjax.sampling import Sampling
from specjax.topology.shapes import Topology
from specjax.types import CHAIN, LM, Batch, ModelParams, Output, Params

Texts = Iterator[tuple[jax.Array, jax.Array, jax.Array]]
Along = Callable[[ModelParams, Batch, int], Texts]


def output(target: LM, params: Params, batch: Batch) -> Output:
    """The target's output for all tokens but the last; from ``Batch.features`` if it has them.

    ``params`` are the target's.
    """
    if batch.features is None:
        segments = None if batch.segments is None else batch.segments[:, :-1]
        return lm.forward(target, params, batch.tokens[:, :-1], segments)
    assert target.embed is not None and target.unembed is not None
    # Features may be stored in fewer bits than the model computes in.
    dtype = jax.eval_shape(target.embed, params, batch.tokens).dtype
    stored = jax.tree.map(lambda x: x.astype(dtype), batch.features)
    return Output(target.unembed(params, stored.hidden), stored.hidden, tuple(stored.taps))


def begin(heads: Heads, target: LM, params: ModelParams, batch: Batch) -> tuple[Output, Any]:
    """The target's output along the text, and the state of the heads at each feature."""
    out = output(target, params.target, batch)
    features = heads.read(out)
    if heads.prefix is not None:
        cache = heads.prefix.init_cache(features.shape[0], 0)
        layout = None if batch.segments is None else tree.segments(batch.segments[:, :-1])
        features, _ = heads.prefix.apply(params, features, cache, layout)
    return out, heads.begin(params, features)


def along(heads: Heads, target: LM, params: ModelParams, batch: Batch, depth: int) -> Texts:
    """``Along`` of heads, after its first two arguments."""
    out, state = begin(heads, target, params, batch)
    size = out.hidden.shape[1]
    for d in range(depth):
        logits, state = heads.step(params, state, d, ahead(batch.tokens, d + 1, size))
        yield label(batch, d + 2)[0], logits, ahead(out.logits, d + 1, size)


def ahead(x: jax.Array, by: Any, size: int) -> jax.Array:
    """x[:, s + by] for s below ``size``; beyond the end the last entry, where no label counts."""
    return jnp.take(x, jnp.minimum(jnp.arange(size) + by, x.shape[1] - 1), axis=1)


def of_output(target: LM | None, batch: Batch) -> Batch:
    """The batch with ``Batch.output``, if features are read of a target with an encoder.

    At the places of a source the features are the encoder's. The first draft is made from the last
    of them, after which the start token is pending; no draft begins from the others.
    """
    if target is None or target.encoder is None:
        return batch
    start = jnp.argmax(batch.tokens == target.encoder.start, -1)
    return batch.replace(output=start.astype(jnp.int32))


def label(batch: Batch, by: Any, depth: Any = None) -> tuple[jax.Array, jax.Array]:
    """The label i32[B,T] of each feature, ``by`` tokens ahead, and whether it counts bool[B,T].

    It counts inside the text and the document of the feature; with ``Batch.depths`` only where it
    is for this ``depth`` of a draft (None: whatever its depth); with ``Batch.output`` only where a
    draft can begin.
    """
    size = batch.tokens.shape[1] - 1
    counted = jnp.broadcast_to(jnp.arange(size) + by <= size, (batch.tokens.shape[0], size))
    if batch.labelled is not None:
        counted &= ahead(batch.labelled, by, size)
    if batch.segments is not None:
        counted &= ahead(batch.segments, by, size) == batch.segments[:, :-1]
    if batch.depths is not None and depth is not None:
        counted &= ahead(batch.depths, by, size) == depth
    if batch.output is not None:
        # The feature at s has the pending token s + 1.
        counted &= jnp.arange(size) + 1 >= batch.output[:, None]
    return ahead(batch.tokens, by, size), counted


def number_of_labels(batch: Batch, depths: int) -> jax.Array:
    """i32[]: what a loss of so many depths divides each of them by.

    The number of labels of the first depth. With ``Batch.depths`` the depths have different labels,
    and the number is that of all together.
    """
    every = range(1 if batch.depths is None else depths)
    return functools.reduce(jnp.add, (label(batch, d + 2, d)[1].sum() for d in every))


def foresee_chain(
    along: Along, depth: int, params: ModelParams, batch: Batch, sampling: Sampling
) -> jax.Array:
    """f32[B,T,depth]: ``Training.foresee`` of a chain drawn from the drafter's probabilities."""
    return _foresee.of_pending(_foresee.chain_along(along, depth, params, batch, sampling))


def foresee_tree(
    along: Along, shape: Topology, params: ModelParams, batch: Batch, sampling: Sampling
) -> jax.Array:
    """f32[B,T,depth]: ``Training.foresee`` of the most probable tokens as a tree of this shape."""
    return _foresee.of_pending(_foresee.tree_along(along, shape, params, batch, sampling))


def ranks(along: Along, depth: int, params: ModelParams, batch: Batch) -> jax.Array:
    """i32[B,T,depth]: ``Training.ranks``."""
    texts = along(params, batch, depth)
    each = [_foresee.rank(logits, labels) for labels, logits, _ in texts]
    # + 1 and - 1: the first pending token, which has no feature, gets -1.
    return _foresee.of_pending(jnp.stack(each, -1) + 1) - 1


def foresee(along: Along, plan: Plan) -> Callable[..., jax.Array] | None:
    """``Training.foresee`` of a plan; None for drafts of another shape in each context."""
    growth = plan.growth
    if not isinstance(growth, Fixed) or plan.controller is not None:
        return None
    if growth.how == "top_k":
        return Bound(foresee_tree, along, growth.shape)
    if growth.siblings == CHAIN:
        return Bound(foresee_chain, along, growth.depth)
    return None
