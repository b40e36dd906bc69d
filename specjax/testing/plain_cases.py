"""Cases for rules: drafts without a model, deep, wide or empty, and real drafters of each kind."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import drafters, sampling
from specjax.rng import DRAFT
from specjax.testing.models import random_table, tabular
from specjax.topology.shapes import Topology
from specjax.types import (
    CHAIN,
    COUPLED,
    DETERMINISTIC,
    IID,
    INDEPENDENT,
    LM,
    WITHOUT_REPLACEMENT,
    Draft,
    Drafter,
    ModelParams,
)

VOCAB = 3
PROMPT = [2, 1]
# Its last two tokens occurred before, so lookups draft.
REPEATED = [0, 2, 1, 0, 2, 1]
# A chain of four, and a tree of three levels with three siblings on each, not numbered by levels.
LONG_CHAIN = Topology((-1, 0, 1, 2))
DEEP_TREE = Topology((-1, -1, -1, 0, 0, 0, 3, 3, 3, 1, 9))
# Eight nodes on three levels, with three, two, one and no children.
IRREGULAR = Topology((-1, -1, -1, 0, 0, 1, 3, 3))
# Kind of siblings -> vocabulary with which all outcomes of its deep drafts are enumerated.
_DEEP = {CHAIN: 3, IID: 2, INDEPENDENT: 2, WITHOUT_REPLACEMENT: 3, DETERMINISTIC: 4, COUPLED: 2}
# Kind of siblings -> a drafter with draft models whose drafts a rule for them takes.
_REAL: dict[str, tuple[str, dict[str, Any]]] = {
    CHAIN: ("draft_model", {"gamma": 2}),
    INDEPENDENT: ("specinfer", {"tree": "chain:2"}),
    DETERMINISTIC: ("draft_tree", {"tree": IRREGULAR, "siblings": IID}),
    **{
        kind: ("draft_tree", {"tree": "2x1", "siblings": kind})
        for kind in (IID, WITHOUT_REPLACEMENT, COUPLED)
    },
}


class Case(NamedTuple):
    """A drafter with its models."""

    name: str
    target: LM
    drafter: Drafter
    params: ModelParams


def deep(siblings: str, *, holes: bool = False, sparse: bool = False) -> Case:
    """A chain of four nodes, or a tree of three levels with three siblings, of one kind.

    ``holes``: some nodes below valid ones are never valid. ``sparse``: in half of the contexts one
    token has probability 0 in the drafts.
    """
    chain = siblings == CHAIN
    shape = LONG_CHAIN if chain else DEEP_TREE
    drafter = plain_drafts(shape, siblings, ((2,) if chain else (4, 6, 9)) if holes else ())
    name = f"deep {siblings}" + ", holes" * holes + ", sparse" * sparse
    return _case(name, drafter, _DEEP[siblings], sparse)


def star(siblings: str, width: int, vocab: int = VOCAB) -> Case:
    """``width`` siblings below the pending token and nothing below them; 0: an empty draft."""
    return _case(f"{width} {siblings}", plain_drafts(Topology((-1,) * width), siblings), vocab)


def _case(name: str, drafter: Drafter, vocab: int, sparse: bool = False) -> Case:
    """A case of ``plain_drafts``, with three tables of logits."""
    tables = [random_table(seed, vocab, sparse=sparse and seed == 1) for seed in (1, 2, 3)]
    params = ModelParams(random_table(0, vocab), jnp.stack(tables))
    return Case(name, tabular(vocab), drafter, params)


@functools.cache
def real(siblings: str) -> Case:
    """A drafter with draft models, for a rule that takes such siblings."""
    method, keys = _REAL[siblings]
    target, draft, other = (tabular(VOCAB, name) for name in ("tabular", "draft", "other draft"))
    one, two = random_table(1, VOCAB), random_table(2, VOCAB)
    several = siblings == INDEPENDENT
    models = {"models": (draft, other)} if several else {"model": draft}
    drafter = drafters.make(method, target, **models, **keys)
    params = ModelParams(random_table(0, VOCAB), (one, two) if several else one)
    return Case("irregular" if siblings == DETERMINISTIC else siblings, target, drafter, params)


def prompt(case: Case, tokens=PROMPT) -> list[int]:
    """The tokens, in the vocabulary of the case."""
    return [token % case.target.vocab_size for token in tokens]


@functools.cache
def plain_drafts(shape: Topology, siblings: str, holes: tuple[int, ...] = ()) -> Drafter:
    """A drafter without a model and a state: a tree of this shape, drawn from tables of logits.

    It serves to test rules: shapes are allowed that no method drafts (three i.i.d. siblings with
    two tokens). Equal arguments give the same drafter.

    ``params.draft`` is f[K,V+1,V,V]: K tables of logits, indexed by the last two tokens of a path.
    Independent siblings of rank r are drawn from table r modulo K, all others from table 0. The
    nodes ``holes`` are never valid; their tokens are outside the vocabulary, their probs NaN.
    """
    return Drafter(
        functools.partial(_propose, shape, siblings, holes),
        nodes=shape.nodes,
        name=f"{siblings} of {shape.nodes} nodes" + (f" with {len(holes)} holes" if holes else ""),
        siblings=siblings,
        depth=None if siblings == CHAIN else shape.depth,
    )


def _propose(shape: Topology, siblings: str, holes: tuple[int, ...], params, keys, context, state):
    tables = params.draft
    vocab, batch = tables.shape[-1], context.length.shape[0]
    before = jnp.take_along_axis(context.tokens, jnp.maximum(context.length - 2, 0)[:, None], 1)
    # The last two tokens of the path that ends at each node; -1: the pending token.
    ends = {-1: (jnp.where(context.length > 1, before[:, 0], vocab), context.pending)}
    nodes: dict[int, tuple] = {}
    for parent in range(-1, shape.nodes):
        children = list(shape.children[parent + 1])
        if not children:
            continue
        above, last = ends[parent]
        several = tables[: len(children) if siblings == INDEPENDENT else 1]
        each = [sampling.to_probs(table[above, last], context.sampling) for table in several]
        for node, drawn in zip(children, _siblings(siblings, keys, children, each), strict=True):
            nodes[node], ends[node] = drawn, (last, drawn[0])
    tree = siblings != CHAIN
    drawn = zip(*(nodes[node] for node in range(shape.nodes)), strict=True)
    parts = [jnp.stack(part, 1) for part in drawn]
    tokens, valid, probs = parts or (
        jnp.zeros((batch, 0), jnp.int32),
        jnp.zeros((batch, 0), bool),
        jnp.zeros((batch, 0, vocab), tables.dtype),
    )
    hole = jnp.isin(jnp.arange(shape.nodes), jnp.asarray(holes, jnp.int32))
    parents = jnp.broadcast_to(jnp.asarray(shape.parents, jnp.int32), (batch, shape.nodes))
    draft = Draft(
        tokens=jnp.where(hole, -7, tokens),
        valid=valid & ~hole,
        parents=parents if tree else None,
        probs=None if siblings == DETERMINISTIC else jnp.where(hole[:, None], jnp.nan, probs),
        depth=shape.depth if tree else None,
    )
    return draft, state


def _siblings(kind: str, keys, nodes: list[int], each: list[jax.Array]) -> list[tuple]:
    """Token i32[B], existence bool[B] and probs f[B,V] of each of the siblings ``nodes``."""
    probs = each[0]
    if kind == DETERMINISTIC:
        highest, tokens = sampling.top(probs, len(nodes))
        return [(tokens[:, rank], highest[:, rank] > 0, probs) for rank in range(len(nodes))]
    result = []
    for rank, node in enumerate(nodes):
        own = each[rank % len(each)]
        exists = jnp.ones(own.shape[:1], bool)
        if kind == WITHOUT_REPLACEMENT:
            for token, *_ in result:
                own = jnp.where(jnp.arange(own.shape[-1]) == token[:, None], 0, own)
            total = own.sum(-1, keepdims=True)
            exists = total[:, 0] > 0
            own = jnp.where(total > 0, own / jnp.where(total > 0, total, 1), probs)
        result.append((keys.draw(DRAFT, own, node), exists, own))
    return result
