"""What the tests of early exits share: a decoder, its hidden states, drafts compared with them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, drafters, step, testing
from specjax.drafters.self_speculation import _exit_rounds
from specjax.models import lm
from specjax.testing import loop

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3]]
# Texts are padded to this length, so that all share one program.
LONGEST = 40


@functools.cache
def tiny(family="llama", layers=3, scale=8.0):
    """(LM, params) of a random decoder."""
    return testing.tiny(family, 0, scale, layers=layers)


@functools.partial(jax.jit, static_argnums=0)
def _outputs(tap, params, text):
    target, _ = tiny()
    x = lm.forward(target.with_taps((tap,)), params, text).taps[0]
    normed = target.last_norm(params, x)
    return x[0], normed[0], target.unembed(params, normed)[0]


def outputs(params, tap, text):
    """Of the layer ``tap`` along a text: its output, after the last norm, and logits; [T,...]."""
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(text)] = text
    return [np.asarray(x)[: len(text)] for x in _outputs(tap, params, jnp.asarray(padded))]


def largest_error(drafter, params, reference, rounds=4):
    """Of the declared probs of chains in several rounds of a ragged batch, from ``reference``.

    ``reference(text) -> f[T,V]`` are the probs after each token of a text.
    """
    target, _ = tiny()
    state = loop.begin(target, drafter, params, PROMPTS, 24, 0)
    play = jax.jit(functools.partial(step.speculative_step, target, drafter, accept.load("chain")))
    worst, accepted = 0.0, 0
    for _ in range(rounds):
        before = jax.tree.map(np.asarray, (state.tokens, state.length))
        state, info = play(params, state)
        accepted += int(info.accepted.sum())
        for row, (text, length) in enumerate(zip(*before, strict=True)):
            path = [*text[:length].tolist(), *np.asarray(info.draft.tokens)[row].tolist()]
            right = reference(path)[length - 1 : -1]
            worst = max(worst, np.abs(np.asarray(info.draft.probs)[row] - right).max())
    assert accepted, "no draft token was accepted: later rounds show nothing"
    return worst


def with_inner(change):
    """``early_exit`` whose inner model is ``change(inner)``."""

    def make(target, **keys):
        inner = _exit_rounds.inner
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_exit_rounds, "inner", lambda *args: change(inner(*args)))
            return drafters.make("early_exit", target, **keys)

    return make
