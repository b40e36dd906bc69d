"""Several sets of skipped sublayers: each row drafts with the one that paid best in its text.

The idea of SWIFT (Xia et al. 2024, 2410.06916) and its relatives, that the best set depends on the
text, with sets that were found before. A row takes each set for a round, and then always the one
with the highest upper confidence bound (UCB1, Auer et al. 2002) of its tokens per time. The choice
depends on earlier rounds only, so the output law does not change.

A pass computes the sets that some row of the batch has taken: at batch 1 one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax.bound import Bound
from specjax.drafters import _growth
from specjax.drafters._growth import Begun, Nodes, Plan, Stepper
from specjax.prompt import check_window
from specjax.types import (
    LM,
    Array,
    Context,
    Drafter,
    ModelParams,
    Output,
    Params,
    Sublayers,
    Verdict,
)

# The weight of the bound's uncertain part: rounds differ by about so much of a plain step's speed.
EXPLORE = 0.3


class State(struct.PyTreeNode):
    """What a row knows of the sets."""

    choice: Array  # i32[B] the set of the next draft
    rounds: Array  # f32[B,n] rounds with each set
    value: Array  # f32[B,n] the mean of tokens per time, in tokens per plain step


class Setup(NamedTuple):
    """The static settings."""

    models: tuple[LM, ...]  # the parts
    costs: tuple[float, ...]  # of a draft step with each, in plain steps
    depth: int  # M, draft steps in a round


def build(target: LM, parts: tuple[Sublayers, ...], plan: Plan) -> Drafter:
    """The drafter. Raises UserError for drafts longer than a sliding window of the model."""
    assert target.layers is not None
    costs = tuple((len(p.attention) + len(p.mlp)) / (2 * target.layers) for p in parts)
    setup = Setup(tuple(map(target.with_part, parts)), costs, plan.growth.depth)
    stepper = Stepper(
        init=Bound(_init, setup),
        begin=Bound(_begin, setup),
        step=Bound(_step, setup),
        commit=Bound(_commit, setup),
        looped=True,
    )
    drafter = _growth.build("layer_skip", stepper, plan, _no_params, gaps=False)
    check_window(target, drafter)
    # A draft step costs what those sets cost that the rows have taken.
    return drafter._replace(history=True, constant_cost=False)


def _no_params(key: Any) -> Params:
    return {}


def _init(
    setup: Setup, params: ModelParams, context: Context, target_out: Output, slots: int
) -> State:
    shape = (context.length.shape[0], len(setup.models))
    return State(jnp.zeros(shape[:1], jnp.int32), jnp.zeros(shape), jnp.zeros(shape))


def _begin(setup: Setup, params: ModelParams, context: Context, kept: State) -> Begun:
    """``Stepper.begin``: the pending token has the first place of each set's block."""

    def run(model: LM, block: None) -> tuple[Array, Any]:
        out, own = model.apply(params.target, context.pending[:, None], context.cache)
        return out.logits, own

    logits, memory = _chosen(setup, kept.choice, run, (None,) * len(setup.models))
    return Begun(logits[:, 0], kept, memory, reads=(context.cache, kept.choice))


def _step(
    setup: Setup, params: ModelParams, reads: tuple[Any, Array], nodes: Nodes, blocks: Any
) -> tuple[Array, Any]:
    cache, choice = reads

    def run(model: LM, block: Any) -> tuple[Array, Any]:
        out, own = model.apply(params.target, nodes.tokens, cache, nodes.layout, block)
        return out.logits, own

    return _chosen(setup, choice, run, blocks)


def _chosen(
    setup: Setup, choice: Array, run: Callable[[LM, Any], Any], blocks: tuple[Any, ...]
) -> tuple[Array, tuple[Any, ...]]:
    """The logits of each row's set, and the memory of all; that of a set that no row took is 0."""
    logits, memories = None, []
    for index, (model, block) in enumerate(zip(setup.models, blocks, strict=True)):
        one = Bound(run, model, block)
        # Only the shapes are needed.
        with jax.disable_jit(False):
            shapes = jax.eval_shape(one)
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: B023, E731
        own, memory = jax.lax.cond((choice == index).any(), one, zeros)
        mine = (choice == index)[:, None, None]
        logits = own if logits is None else jnp.where(mine, own, logits)
        memories.append(memory)
    assert logits is not None
    return logits, tuple(memories)


def _commit(
    setup: Setup,
    params: ModelParams,
    kept: State,
    drafted: None,
    verdict: Verdict,
    target_out: Output,
) -> State:
    accepted = (verdict.path >= 0).sum(-1)
    times = 1 + setup.depth * jnp.asarray(setup.costs, jnp.float32)
    newest = (1 + accepted) / times[kept.choice]
    mine = jnp.arange(len(setup.models)) == kept.choice[:, None]
    rounds = kept.rounds + mine
    value = jnp.where(mine, kept.value + (newest[:, None] - kept.value) / rounds, kept.value)
    total = rounds.sum(-1, keepdims=True)
    bound = value + EXPLORE * jnp.sqrt(2 * jnp.log(total) / jnp.maximum(rounds, 1))
    choice = jnp.argmax(jnp.where(rounds == 0, jnp.inf, bound), -1).astype(jnp.int32)
    alive = verdict.count > 0
    new = State(choice, rounds, value.astype(kept.value.dtype))
    pick = lambda a, b: jnp.where(alive.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
    return jax.tree.map(pick, new, kept)
