"""One draft, written by several systems in turn and at its end by a drafter without a model.

Each part continues the tokens of the parts before it; the horizontal cascade of CS Drafting (Chen
et al. 2023, 2312.11462).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.bound import Bound
from specjax.drafters import _limited
from specjax.drafters.draft_models import _small_model
from specjax.drafters.nested import _stages, _system
from specjax.drafters.nested._system import System
from specjax.errors import UserError
from specjax.prompt import check_window
from specjax.rng import RowKeys
from specjax.types import (
    LM,
    Array,
    Context,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Rare,
    Verdict,
)


class State(struct.PyTreeNode):
    """The states of the parts."""

    systems: tuple[_system.State, ...]
    leaf: Any


class Row(NamedTuple):
    """The parts, in the order of their tokens. Static."""

    systems: tuple[System, ...]
    leaf: Drafter | None  # chains; if a system is before it, without a state
    vocab_size: int

    @property
    def nodes(self) -> int:
        """The number of tokens."""
        own = sum(system.gamma for system in self.systems)
        return own + (self.leaf.nodes if self.leaf else 0)


def build(name: str, row: Row, init_params: Any) -> Drafter:
    """The drafter ``name`` of this row. L1 with a rule for chains."""
    leaf = row.leaf
    if leaf is not None and not row.systems:
        return leaf
    parts = [*(part.drafter for part in row.systems), *([] if leaf is None else [leaf])]
    return Drafter(
        init_params=init_params,
        init=Bound(_init, name, row),
        propose=Bound(_propose, row),
        update=Bound(_update, row),
        nodes=row.nodes,
        name=name,
        # The number of inner rounds depends on the text.
        constant_cost=False,
        whole=leaf is None,
        features=any(system.reader.features for system in row.systems),
        history=any(part.drafter.history for part in row.systems),
        rare=Rare(check_rows=_limited.check_rows(part.rare for part in parts)),
        # An overlay has no room for the tokens of rounds in which another drafter proposes.
        gaps=False,
    )


def shortened(leaf: Drafter, count: int) -> Drafter:
    """A drafter of chains with at most ``count`` tokens."""
    if count == leaf.nodes:
        return leaf

    return leaf._replace(propose=Bound(_first, leaf, count), nodes=count)


def _first(leaf: Drafter, count: int, *args: Any) -> tuple[Draft, Any]:
    draft, state = leaf.propose(*args)
    return tree.first_nodes(draft, count), state


def checked(made: Drafter, *models: LM) -> Drafter:
    """The drafter, if its drafts fit into the sliding windows of these models; raises UserError.

    Its ``init`` raises UserError for texts longer than the positions of a model.
    """
    for model in models:
        check_window(model, made)
    return made._replace(init=Bound(_init_checked, made, models))


def _init_checked(made: Drafter, models: tuple[LM, ...], *args: Any) -> Any:
    """``args``: params, context, target_out and slots."""
    for model in models:
        _small_model.check_positions(model, args[3] - made.nodes)
    return made.init(*args)


def _init(
    name: str, row: Row, params: ModelParams, context: Context, target_out: Output, slots: int
) -> State:
    given = params, context, target_out, slots
    leaf = () if row.leaf is None else row.leaf.init(*given)
    if row.leaf is not None and jax.tree.leaves(leaf):
        raise UserError(
            f"{name}: {row.leaf.name} keeps a state between rounds and cannot continue the drafts "
            "of a model; let it draft for a model only, or take prompt_lookup or ngram_lm"
        )
    states = tuple(_system.init(system, *given) for system in row.systems)
    for system, own in zip(row.systems, states, strict=True):
        if system.offset and jax.tree.leaves(_kept_by_leaves(own.inner)):
            raise UserError(
                f"{name}: a drafter that keeps a state between rounds cannot draft for a model "
                "that continues the drafts of another one; let each draft have tokens of one "
                "model, or take prompt_lookup or ngram_lm"
            )
    return State(states, leaf)


def _kept_by_leaves(inner: Any) -> Any:
    """What drafters without a model keep at all levels inside a system.

    They would read drafts of the parts before it, which may be withdrawn, as committed text.
    """
    if not isinstance(inner, State):
        return inner
    return [inner.leaf, *(_kept_by_leaves(system.inner) for system in inner.systems)]


def _propose(
    row: Row, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> tuple[Draft, State]:
    states, parts, text = [], [], context
    for index, (system, old) in enumerate(zip(row.systems, state.systems, strict=True)):
        drawn, _, new = _system.draw(system, params, keys.inner(index), text, old)
        parts.append(drawn)
        states.append(new)
        text = _longer(text, drawn.tokens)
    if row.leaf is not None:
        own = keys.inner(len(row.systems))
        parts.append(row.leaf.propose(params, own, text, state.leaf)[0])
    return _joined(row, parts), State(tuple(states), state.leaf)


def _longer(context: Context, tokens: Array) -> Context:
    """The context with draft tokens i32[B,n] after its text."""
    text = tree.put(context.tokens, tokens, context.length)
    return context.replace(tokens=text, length=context.length + tokens.shape[1])


def _joined(row: Row, parts: list[Draft]) -> Draft:
    """The parts as one chain; a token that was not drawn has probability 1."""
    every = zip(parts, _stages.probs_of(parts, row.vocab_size), strict=True)
    joined = tree.join(*(Draft(part.tokens, part.valid, probs=probs) for part, probs in every))
    finite = [part.finite for part in parts if part.finite is not None]
    return joined.replace(finite=functools.reduce(jnp.logical_and, finite))


def _update(
    row: Row, params: ModelParams, state: State, draft: Draft, verdict: Verdict, out: Output
) -> State:
    accepted = (verdict.path >= 0).sum(-1, dtype=jnp.int32)
    every = zip(row.systems, state.systems, strict=True)
    settled = (_system.settle(system, params, old, accepted, verdict, out) for system, old in every)
    return state.replace(systems=tuple(settled))
