"""What the parts of a round cost, each measured by itself: a one-token pass, a draft, a pass over the draft.

Every part is run many times in one compiled loop whose turns depend on each other, so that the compiler can neither hoist nor
drop the work, and the host has no part in it. The loop is as long as it takes for the clock to be sure (``LEAST`` seconds).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import sampling, step
from specjax.rng import RowKeys
from specjax.types import CHAIN, LM, Context, DecodeState, Drafter, ModelParams

LEAST = 0.1  # seconds of a sample
MOST = 1000  # turns of a sample


class Clock:
    """A part of a round that can be timed again and again."""

    def __init__(self, loop: Callable[..., jax.Array], turns: int = 0):
        """``loop(params, state, turns)`` runs the part ``turns`` times; 0 = as many as ``LEAST`` seconds take."""
        self._loop, self.turns = loop, turns

    def compile(self, params: ModelParams, state: DecodeState) -> None:
        """Runs the part once: the same program as ``sample``'s."""
        self._seconds(params, state, 1)

    def sample(self, params: ModelParams, state: DecodeState) -> float:
        """Seconds of one turn. The first sample also compiles, warms up and counts how many turns are enough."""
        if not self.turns:
            self._seconds(params, state, 1)
            one = self._seconds(params, state, 2) / 2
            self.turns = min(MOST, max(2, int(LEAST / max(one, 1e-9))))
        return self._seconds(params, state, self.turns) / self.turns

    def _seconds(self, params: ModelParams, state: DecodeState, turns: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(self._loop(params, state, turns))
        return time.perf_counter() - began


def of_pass(target: LM, size: int) -> Clock:
    """Times one target pass over a chain of ``size`` tokens per row."""
    return Clock(lambda params, state, turns: _pass_loop(target, size, None, params, state, turns))


def of_draft(drafter: Drafter) -> Clock:
    """Times one call of the drafter's ``propose``."""
    return Clock(functools.partial(_draft_loop, drafter))


def of_verify(target: LM, drafter: Drafter) -> Clock:
    """Times the pass that verifies a draft; a tree as the tree that the drafter proposes after the text."""

    def loop(params, state, turns):
        parents = _proposed(drafter, params, state) if drafter.siblings != CHAIN else None
        return _pass_loop(target, drafter.nodes + 1, parents, params, state, turns)

    return Clock(loop)


@functools.partial(jax.jit, static_argnums=0)
def _proposed(drafter: Drafter, params: ModelParams, state: DecodeState):
    keys = RowKeys(state.keys, state.round, state.length)
    draft, _ = drafter.propose(
        params, keys, Context(state.tokens, state.length, state.sampling), state.draft
    )
    return step.block_parents(draft)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pass_loop(target: LM, size: int, parents, params: ModelParams, state: DecodeState, turns):
    tokens = jnp.broadcast_to(jnp.maximum(state.tokens[:, :1], 0), (state.tokens.shape[0], size))

    def turn(_, carry):
        tokens, cache = carry
        out, cache = target.apply(params.target, tokens, cache, parents)
        return sampling.argmax(out.logits), cache

    return jax.lax.fori_loop(0, turns, turn, (tokens, state.cache))[0]


@functools.partial(jax.jit, static_argnums=0)
def _draft_loop(drafter: Drafter, params: ModelParams, state: DecodeState, turns):
    def turn(index, carry):
        tokens, inner = carry
        keys = RowKeys(state.keys, state.round + index, state.length)
        draft, inner = drafter.propose(
            params, keys, Context(tokens, state.length, state.sampling), inner
        )
        probe = (
            draft.tokens.sum()
            if draft.probs is None
            else draft.tokens.sum() + (draft.probs[:, -1] > 2).sum()
        )
        return tokens + jnp.where(probe == -7, 1, 0), inner  # never, but the compiler cannot know

    return jax.lax.fori_loop(0, turns, turn, (state.tokens, state.draft))[0]
