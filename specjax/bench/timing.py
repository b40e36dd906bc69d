"""The cost of the parts of a round, each timed alone: a one-token pass, a draft, its verification.

Every part runs many times in one compiled loop. Each iteration depends on the one before it, so the
compiler can neither hoist nor drop the work, and the host takes no part in it. The loop is long
enough for the clock to be exact (``MIN_SECONDS``).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import sampling, step, tree
from specjax.bound import Bound
from specjax.drafters import none
from specjax.rng import RowKeys
from specjax.types import CHAIN, LM, DecodeState, Drafter, ModelParams

MIN_SECONDS = 0.1  # of a sample
MAX_ITERATIONS = 1000  # of a sample


class Clock:
    """Times one part of a round, any number of times."""

    def __init__(self, loop: Callable[..., jax.Array], iterations: int = 0):
        """``loop(params, state, n)`` runs the part n times.

        ``iterations`` of one sample; 0 = as many as ``MIN_SECONDS`` take.
        """
        self.loop, self.iterations = loop, iterations

    def compile(self, params: ModelParams, state: DecodeState) -> None:
        """Runs the part once: the same program as in ``sample``."""
        self._seconds(params, state, 1)

    def sample(self, params: ModelParams, state: DecodeState) -> float:
        """Seconds of one iteration.

        The first sample also compiles, warms up and chooses the number of iterations.
        """
        if not self.iterations:
            self._seconds(params, state, 1)
            one = self._seconds(params, state, 2) / 2
            self.iterations = min(MAX_ITERATIONS, max(2, int(MIN_SECONDS / max(one, 1e-9))))
        return self._seconds(params, state, self.iterations) / self.iterations

    def _seconds(self, params: ModelParams, state: DecodeState, iterations: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(self.loop(params, state, iterations))
        return time.perf_counter() - began


def commit_none(target: LM, cache: Any, block: Any) -> Any:
    """The cache after a commit of none of the block's tokens: it is written and does not advance.

    The count is 0, but the compiler cannot derive that. With a constant 0 it drops the block; the
    write does not depend on what was read then (``specjax.cache.write_after``), and XLA:CPU copies
    every buffer, which no loop of decoding does.
    """
    return target.commit(cache, block, jnp.minimum(cache.length, 0))


def of_pass(target: LM, size: int) -> Clock:
    """Times one target pass over a chain of ``size`` tokens per row."""
    return of_verify(target, none.make(target), size)


def of_draft(drafter: Drafter) -> Clock:
    """Times one call of the drafter's ``propose``."""
    return Clock(Bound(_draft_loop, drafter))


def of_verify(target: LM, drafter: Drafter, width: int | None = None) -> Clock:
    """Times the target pass that verifies the first ``width`` - 1 nodes of a draft (None: all).

    For a tree: the tree that the drafter proposes after the text of the state.
    """
    size = drafter.nodes + 1 if width is None else width
    # One program for all drafters whose target is the plain one.
    own = None if drafter.rare.lower is None else drafter

    def loop(params, state, iterations):
        chain = drafter.siblings == CHAIN
        layout = None if chain else _proposed(drafter, size - 1, params, state)
        draft = None
        if own is None:
            params = ModelParams(params.target)
        else:
            draft = state.draft
        first = state.tokens[:, :1]
        return _pass_loop(target, own, size, layout, params, first, state.cache, draft, iterations)

    return Clock(loop)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _proposed(drafter: Drafter, nodes: int, params: ModelParams, state: DecodeState):
    """The layout of the block that the target verifies."""
    keys = RowKeys(state.keys, state.round, state.length)
    draft, _ = drafter.propose(params, keys, step.context_of(state), state.draft)
    return tree.block_layout(tree.first_nodes(draft, nodes))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _pass_loop(
    target: LM,
    drafter: Drafter | None,
    size: int,
    layout: Any,
    params: ModelParams,
    first: jax.Array,
    cache: Any,
    draft: Any,
    iterations: int,
):
    """Passes over ``size`` tokens; ``first`` i32[B,1] are tokens.

    ``drafter`` and ``draft``, its state: of a drafter on which the passes depend.
    """
    tokens = jnp.broadcast_to(jnp.maximum(first, 0), (first.shape[0], size))

    def iteration(_, carry):
        tokens, cache = carry
        scoring, own = target, params.target
        if drafter is not None:
            # What drafting has computed depends on the iteration, so that no part is hoisted.
            tied, _ = jax.lax.optimization_barrier((draft, tokens))
            scoring, own = drafter.scoring(target, params, tied)
        out, block = scoring.apply(own, tokens, cache, layout)
        return sampling.argmax(out.logits), commit_none(target, cache, block)

    return jax.lax.fori_loop(0, iterations, iteration, (tokens, cache))[0]


@functools.partial(jax.jit, static_argnums=0)
def _draft_loop(drafter: Drafter, params: ModelParams, state: DecodeState, iterations):
    def iteration(index, carry):
        tokens, inner = carry
        keys = RowKeys(state.keys, state.round + index, state.length)
        context = step.context_of(state).replace(tokens=tokens)
        draft, inner = drafter.propose(params, keys, context, inner)
        probe = draft.tokens.sum()
        if draft.probs is not None:
            probe += (draft.probs[:, -1] > 2).sum()
        # The sum is never -7, but the compiler cannot derive that: it must compute the draft.
        return tokens + jnp.where(probe == -7, 1, 0), inner

    return jax.lax.fori_loop(0, iterations, iteration, (state.tokens, state.draft))[0]
