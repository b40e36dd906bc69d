"""What drafters share that are heads on the target's last feature: one description serves decoding, training and forecasts.

The feature f of a token is the vector that the target's LM head multiplies. With tokens[t] pending, heads read f[t-1] (the
feature that the pending token was drawn from); the head of depth d, counted from 0, guesses tokens[t+1+d]. Drafting and
training call the very same ``step``, so what is trained is what is run.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.checks import one_of
from specjax.drafters import _foresee, _growth
from specjax.drafters.heads import _loss, _prefix
from specjax.errors import UserError
from specjax.models import head_layouts as layouts
from specjax.topology import search as tree_search
from specjax.topology import shapes
from specjax.topology.shapes import Topology
from specjax.types import CHAIN, LM, Batch, Drafter, Params, Training

SEARCHES = {"optimal": tree_search.optimal, "greedy": tree_search.greedy}


class Heads(NamedTuple):
    """A family of heads as pure functions of (pair of parameters, state, ...); leading dimensions [...] are free.

    ``begin(params, feature [...,E]) -> state`` and ``step(params, state, depth, tokens i32[...]) -> (logits f[...,V],
    state)``, where ``tokens`` is the newest token known: the pending one at depth 0, then the draft's own.
    """

    name: str
    depth: int  # how many heads
    begin: Callable[..., Any]
    step: Callable[..., tuple[jax.Array, Any]]
    start: Callable[..., Params]  # (target_params, key) -> parameters to begin training with
    independent: bool = False  # whether ``step`` ignores tokens, takes a traced depth and returns the state as it was
    prefix: _prefix.Prefix | None = None  # without one, heads read one feature
    facts: dict[str, Any] = {}  # noqa: RUF012  (what config.json must say of the parameters, beyond their shapes)


class State(struct.PyTreeNode):
    """What a row carries."""

    feature: jax.Array  # [B,E] of the token before the pending one
    known: jax.Array  # bool[B] False: the prompt has one token only, so there is none yet
    cache: Any = None  # the prefix's


def build(
    target: LM,
    heads: Heads,
    *,
    tree: Topology | str = "",
    nodes: int = 0,
    search: str = "optimal",
    siblings: str = "top_k",
    params: Params = None,
    accuracy: Any = None,
) -> Drafter:
    """The drafter of these heads. Deterministic ("top_k") or sampled drafts, as chains or trees; L1 with a rule that fits.

    Args:
        target: the model that the heads read.
        tree: shape of a draft, as ``topology.parse`` reads it; "" is the chain of all heads, or with ``nodes`` a search.
        nodes: size of the tree to search for, from the accuracies measured at the end of training.
        search: "optimal" (Sequoia's dynamic program) or "greedy" (Medusa's: the likeliest next node).
        siblings: "top_k", or drawn from the heads' laws: "without_replacement", "iid".
        params: the heads' parameters.
        accuracy: f64[K,W]: how often the token at depth d was head d's choice of rank r.

    Raises:
        UserError: a tree deeper than there are heads, a search without accuracies.
    """
    one_of("siblings", siblings, tuple(_growth.KINDS))
    shape = _shape(heads, tree, nodes, search, accuracy, target.vocab_size)
    kind = CHAIN if shape.branching == 1 else _growth.KINDS[siblings]

    def init(params, context, target_out, slots):
        batch, size = target_out.hidden.shape[:2]
        count = context.length - 1
        features, cache = target_out.hidden, None
        if heads.prefix is not None:
            cache = heads.prefix.init_cache(batch, slots)
            if size:
                features, cache = _prefix.feed(heads.prefix, params, features, count, cache)
        if not size:
            return State(jnp.zeros((batch, features.shape[-1]), features.dtype), count > 0, cache)
        return State(_at(features, jnp.maximum(count - 1, 0)), count > 0, cache)

    def propose(params, keys, context, state):
        def expand(inner, level, nodes, tokens):
            if heads.independent:
                logits, inner = heads.step(params, inner, level, tokens[:, :1])
                return logits, np.zeros(len(nodes), int), inner
            if level:  # a node goes on from the state of its parent
                above = parents_of(nodes)
                inner = jax.tree.map(lambda x: x[:, above], inner)
            logits, inner = heads.step(params, inner, level, tokens)
            return logits, np.arange(len(nodes)), inner

        def parents_of(nodes):
            level = shape.depths[nodes[0]]
            before = (
                [-1]
                if level == 1
                else [n for n in shape.levels[level - 2] if shape.children[n + 1]]
            )
            return np.array([before.index(shape.parents[node]) for node in nodes])

        inner = heads.begin(params, state.feature[:, None])
        draft, _ = _growth.grow(keys, context, shape, siblings, kind, inner, expand)
        # A row without a feature drafts nothing; what its heads make of zeros is nobody's failure.
        finite = None if draft.finite is None else draft.finite | ~state.known
        return draft.replace(valid=draft.valid & state.known[:, None], finite=finite), state

    def update(params, state, draft, verdict, target_out):
        # The last token that stood and was fed: the pending one, or the accepted node before the newest token.
        last = jnp.maximum(verdict.count - 1, 0)
        block = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
        cache = state.cache
        if heads.prefix is None:
            feature = _at(target_out.hidden, jnp.take_along_axis(block, last[:, None], 1)[:, 0])
        else:
            features = jnp.take_along_axis(target_out.hidden, jnp.maximum(block, 0)[..., None], 1)
            features, cache = heads.prefix.apply(params, features, cache, None)
            cache = heads.prefix.commit(cache, verdict.count)
            feature = _at(features, last)
        alive = verdict.count > 0
        return State(jnp.where(alive[:, None], feature, state.feature), state.known | alive, cache)

    def foresee(params, batch: Batch, sampling):
        texts = _loss.along(heads, target, params, batch, shape.depth)
        if siblings == "top_k":
            found = _foresee.walk(
                (_foresee.rank(logits, labels) for labels, logits, _ in texts), shape
            )
            found = [each.astype(jnp.float32) for each in found]
        else:
            found = [
                _foresee.kept(logits, theirs, labels, sampling) for labels, logits, theirs in texts
            ]
        return _foresee.late(jnp.stack(found, -1))

    def ranks(params, batch: Batch):
        texts = _loss.along(heads, target, params, batch, heads.depth)
        found = [_foresee.rank(logits, labels) for labels, logits, _ in texts]
        return _foresee.late(jnp.stack(found, -1) + 1) - 1

    return Drafter(
        init_params=lambda key: _given(heads.name, params),
        init=init,
        propose=propose,
        update=update,
        nodes=shape.nodes,
        name=heads.name,
        siblings=kind,
        depth=shape.depth,
        features=True,
        gaps=False,
        training=Training(
            loss=functools.partial(_loss.loss, heads, target),
            start=heads.start,
            foresee=foresee if kind == CHAIN or siblings == "top_k" else None,
            ranks=ranks,
            facts=tuple(sorted(heads.facts.items())),  # hashable: a drafter is a static argument
        ),
    )


def _shape(
    heads: Heads, tree: Topology | str, nodes: int, search: str, accuracy: Any, vocab_size: int
) -> Topology:
    """The draft's shape. Raises UserError."""
    one_of("search", search, tuple(SEARCHES))
    if tree and nodes:
        raise UserError(f"{heads.name} was given a tree and nodes={nodes}; give one of them")
    if search != "optimal" and not nodes:
        raise UserError(
            f"search is {search!r}, and nothing is searched for; give nodes, the size of a tree, or leave it out"
        )
    if nodes:
        if accuracy is None:
            raise UserError(
                f"{heads.name} has no measured accuracies to search a tree of {nodes} nodes with; give tree, or train it here"
            )
        branching = min(tree_search._table(accuracy).shape[1], vocab_size)
        shape, _ = SEARCHES[search](accuracy, nodes, heads.depth, branching)
    else:
        shape = shapes.parse(tree) if tree else shapes.chain(heads.depth)
    shape = shapes.check(shape.parents, vocab_size)
    if shape.depth > heads.depth:
        raise UserError(
            f"the tree is {shape.depth} levels deep and {heads.name} has {heads.depth} heads; take a flatter one"
        )
    return shape


def ends(name: str, target: LM) -> tuple[int, Callable[..., jax.Array], Callable[..., jax.Array]]:
    """What heads need of their target: ``width``, ``embed``, ``unembed``. Raises UserError."""
    if target.embed is None or target.unembed is None or target.width is None:
        raise UserError(f"{name} reads the features of its target, and {target.name} gives none")
    return target.width, target.embed, target.unembed


def load(
    kind: str, target: LM, model: str | os.PathLike | None, params: Params, dtype: Any = None
) -> tuple[Params, dict[str, Any]]:
    """The heads in the directory ``model`` and what its config.json says, or ``params`` and nothing. Raises UserError."""
    if not model:
        if dtype is not None:
            raise UserError(
                f"{kind} was given a dtype, in which files are read, and no files; give model, or leave it out"
            )
        if params is not None:
            layouts.check(kind, params, {"D": target.width or 0, "V": target.vocab_size})
        return params, {}
    if params is not None:
        raise UserError(f"{kind} was given params and a directory {model}; give one of them")
    from specjax.models import head_files  # only here: the core needs no file formats

    head = head_files.read(model, kind, dtype=dtype)
    for name, mine in (("hidden_size", target.width), ("vocab_size", target.vocab_size)):
        theirs = head.config.get(name)
        if theirs is not None and mine is not None and theirs != mine:
            what = "features of width" if name == "hidden_size" else "tokens:"
            raise UserError(
                f"{head.directory} is made for {what} {theirs}, and the target has {mine}; take its own heads"
            )
    known = head.config.get("vocabulary")
    if known and target.vocabulary and known != target.vocabulary:
        raise UserError(
            f"{head.directory} was trained beside a target with other tokens; take the target's own heads"
        )
    return head.params, head.config


def as_stored(**asked_and_stored: tuple[int, int]) -> tuple[int, ...]:
    """The numbers in the files. Raises UserError if others were asked for (0: none were)."""
    for name, (asked, stored) in asked_and_stored.items():
        if asked not in (0, stored):
            raise UserError(
                f"{name} is {asked}, and the heads in the files have {stored}; leave it out"
            )
    return tuple(stored for _, stored in asked_and_stored.values())


def output_kernel(target: LM, target_params: Params) -> jax.Array:
    """The target's LM head as a matrix f32[E,V], to the last bit if its parameters are float32."""
    width, _, unembed = ends("a head", target)
    with jax.default_matmul_precision(
        "highest"
    ):  # accelerators multiply in fewer bits unless told otherwise
        return unembed(target_params, jnp.eye(width))


def logits(values: jax.Array) -> jax.Array:
    """In float32 at least, as every law is."""
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def _given(name: str, params: Params) -> Params:
    if params is None:
        raise UserError(
            f"{name} has no heads yet; give model=, a directory of trained ones (mode train makes them)"
        )
    return params


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values [B,T,E], index i32[B] -> [B,E]"""
    return jnp.take_along_axis(values, index[:, None, None], 1)[:, 0]
