"""Look-ahead embeddings as a stepper, with one or two passes of the target per round.

The id of embedding i is the vocabulary's size plus i (``LM.extended``). No such token is ever
proposed: its nodes are invalid, and the target is fed them (``Draft.fed``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.bound import Bound
from specjax.drafters import _growth
from specjax.drafters._growth import KINDS, Begun, Fixed, Nodes, Plan, Stepper
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads._family import Ends
from specjax.drafters.heads._given import Given
from specjax.drafters.self_speculation import _own_cache
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.topology import shapes
from specjax.types import (
    DETERMINISTIC,
    LM,
    Array,
    Context,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Params,
    Training,
    Verdict,
)


class Setup(NamedTuple):
    """The static settings."""

    target: LM
    ends: Ends
    rows: int  # L, how many embeddings
    calls: int  # passes of the target per round

    @property
    def depth(self) -> int:
        """The longest draft."""
        return self.rows + (self.calls == 2)


class State(struct.PyTreeNode):
    """With one pass per round: the outputs at the embeddings behind the last accepted token."""

    hidden: Array  # [B,L,E]
    known: Array  # bool[B] False: there is none yet, because the prompt has one token only


def rows_of(params: ModelParams) -> Array:
    """[L,E] the embeddings."""
    return params.draft["look_ahead"]


def ids(setup: Setup, *lead: int) -> Array:
    """i32[...,L] the ids of the embeddings, repeated."""
    own = setup.target.vocab_size + jnp.arange(setup.rows, dtype=jnp.int32)
    return jnp.broadcast_to(own, (*lead, setup.rows))


def apply(setup: Setup, params: ModelParams, tokens: Array, cache: Any, layout: Any = None):
    """The target's output for tokens i32[B,T], ids of embeddings among them."""
    assert setup.target.extended is not None
    return setup.target.extended((params.target, rows_of(params)), tokens, cache, layout)[0]


def build(
    setup: Setup, keys: HeadKeys, given: Given, training: Callable[[Setup, Plan], Training]
) -> Drafter:
    """The drafter. L1 with a rule that takes its siblings. Raises UserError."""
    accuracy = given.config.get("accuracy")
    method = Method(
        "pass",
        shapes.chain(setup.depth),
        "iid",
        setup.target.vocab_size,
        setup.depth,
        True,
        # Measured with two passes there is one level more, before the others.
        accuracy[-setup.depth :] if accuracy and len(accuracy) >= setup.depth else None,
    )
    plan = _growth.read(method, keys)
    one = setup.calls == 1
    stepper = Stepper(
        init=Bound(_init, setup) if one else _nothing,
        begin=Bound(_begin_behind if one else _begin_with_pass, setup),
        step=_step,
        commit=Bound(_commit, setup, plan.growth.nodes) if one else _unchanged,
        independent=True,
    )
    drafter = _growth.build(
        "pass",
        stepper,
        plan,
        Bound(_init_params, given.params),
        training=training(setup, plan),
        features=one,
        gaps=not one,
    )
    return _with_embeddings(setup, drafter, plan) if one else drafter


def _init_params(params: Params, key: Any) -> Params:
    del key
    if params is None:
        raise UserError(
            "pass has no embeddings yet; give model=, a directory of trained ones (mode train "
            "makes them)"
        )
    return params


def _step(
    params: ModelParams, logits: Array, nodes: Nodes, block: Any
) -> tuple[jax.Array, jax.Array]:
    """``Stepper.step``: the logits f[B,K,V] of all depths were computed before the draft."""
    own = logits[:, nodes.depth, None]
    return own, own


# Two passes per round.


def _nothing(params: ModelParams, context: Context, target_out: Output, slots: int) -> Any:
    return ()


def _unchanged(params: ModelParams, kept: Any, drafted: None, verdict: Verdict, out: Output) -> Any:
    return kept


def _begin_with_pass(setup: Setup, params: ModelParams, context: Context, kept: Any) -> Begun:
    _own_cache.check_cache("pass", context.cache)
    batch = context.length.shape[0]
    tokens = jnp.concatenate([context.pending[:, None], ids(setup, batch)], 1)
    logits = apply(setup, params, tokens, context.cache).logits
    return Begun(logits[:, 0], kept, reads=logits)


# One pass per round.


def _init(
    setup: Setup, params: ModelParams, context: Context, target_out: Output, slots: int
) -> State:
    """The cache has the prompt without its pending token: the embeddings follow it there."""
    out = apply(setup, params, ids(setup, context.length.shape[0]), context.cache)
    return State(out.hidden, context.length > 1)


def _begin_behind(setup: Setup, params: ModelParams, context: Context, kept: State) -> Begun:
    logits = setup.ends.unembed(params.target, kept.hidden)
    return Begun(logits[:, 0], kept, ready=kept.known, reads=logits)


def _commit(
    setup: Setup,
    nodes: int,
    params: ModelParams,
    kept: State,
    drafted: None,
    verdict: Verdict,
    target_out: Output,
) -> State:
    # The last committed token that the target was fed: the pending token, or an accepted node.
    last = jnp.maximum(verdict.count - 1, 0)
    fed = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    place = jnp.take_along_axis(fed, last[:, None], 1)
    own = 1 + nodes + place * setup.rows + jnp.arange(setup.rows)
    hidden = jnp.take_along_axis(target_out.hidden, own[..., None], 1)
    alive = verdict.count > 0
    return State(jnp.where(alive[:, None, None], hidden, kept.hidden), kept.known | alive)


def _with_embeddings(setup: Setup, drafter: Drafter, plan: Plan) -> Drafter:
    """The drafter whose drafts have the embeddings behind the pending token and each node."""
    growth = plan.growth
    return drafter._replace(
        propose=Bound(_propose, setup, drafter),
        nodes=growth.nodes + (growth.nodes + 1) * setup.rows,
        depth=growth.depth,
        siblings=KINDS[growth.how] if isinstance(growth, Fixed) else DETERMINISTIC,
        # The embeddings are fed in every round, so a round has one width, and none may leave them
        # out: the next draft is made of the outputs at them.
        whole=True,
        rest=None,
        rows=rows_of,
    )


def _propose(
    setup: Setup,
    drafter: Drafter,
    params: ModelParams,
    keys: RowKeys,
    context: Context,
    state: Any,
) -> tuple[Draft, Any]:
    draft, state = drafter.propose(params, keys, context, state)
    batch, nodes = draft.tokens.shape
    parents = draft.parents
    if parents is None:
        parents = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32) - 1, (batch, nodes))
    more = (nodes + 1) * setup.rows
    probs = draft.probs
    if probs is not None:
        probs = jnp.pad(probs, ((0, 0), (0, more), (0, 0)))
    behind = jnp.broadcast_to(jnp.asarray(_parents(nodes, setup.rows)), (batch, more))
    draft = Draft(
        tokens=jnp.concatenate([draft.tokens, ids(setup, batch, nodes + 1).reshape(batch, -1)], 1),
        valid=jnp.pad(draft.valid, ((0, 0), (0, more))),
        parents=jnp.concatenate([parents, behind], 1),
        probs=probs,
        finite=draft.finite,
        fed=jnp.full((batch,), nodes + more, jnp.int32),
        depth=drafter.longest,
    )
    return draft, state


def _parents(nodes: int, rows: int) -> np.ndarray:
    """i32[(nodes+1)*rows]: the parents of the embeddings' nodes, which follow the draft's own."""
    place = np.arange((nodes + 1) * rows)
    return np.where(place % rows == 0, place // rows - 1, nodes + place - 1).astype(np.int32)
