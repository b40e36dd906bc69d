"""What the tests of early exits share: a decoder, its hidden states, drafts compared with them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import self_speculation_exit_rounds as _exit_rounds

from specjax import accept, drafters, step, testing
from specjax.models import lm
from specjax.testing import loop
from specjax.types import Context

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
    normed = target.inside.last_norm(params, x)
    return x[0], normed[0], target.unembed(params, normed)[0]


def outputs(params, tap, text):
    """Of the layer ``tap`` along a text: its output, after the last norm, and logits; [T,...]."""
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(text)] = text
    return [np.asarray(x)[: len(text)] for x in _outputs(tap, params, jnp.asarray(padded))]


def played(drafter, params, rule="chain", rounds=4, **settings):
    """(state before, ``StepInfo``) of each of several rounds of a ragged batch."""
    target, _ = tiny()
    state = loop.begin(target, drafter, params, PROMPTS, 24, 0, **settings)
    play = jax.jit(functools.partial(step.speculative_step, target, drafter, accept.load(rule)))
    for _ in range(rounds):
        before = state
        state, info = play(params, state)
        yield before, info


def texts_of(state):
    """The committed text of each row."""
    return [
        row[:size].tolist()
        for row, size in zip(np.asarray(state.tokens), np.asarray(state.length), strict=True)
    ]


def paths_of(draft):
    """[N+1] nodes on the way to each leaf of the draft of a row, and the leaf."""
    size = len(draft.tokens)
    parents = np.arange(size) - 1 if draft.parents is None else draft.parents
    paths = []
    for leaf in sorted(set(range(size)) - set(parents.tolist())):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        paths.append(path)
    return paths


def largest_error(drafter, params, reference, rule="chain", rounds=4):
    """Of the declared probs of drafts in several rounds of a ragged batch, from ``reference``.

    ``reference(text) -> f[T,V]`` are the probs after each token of a text. Of trees, some rows
    continue with another sibling than the first one.
    """
    worst, accepted, others = 0.0, 0, 0
    for state, info in played(drafter, params, rule, rounds):
        accepted += int(info.accepted.sum())
        differ = np.asarray(info.tokens)[:, 0] != np.asarray(info.draft.tokens)[:, 0]
        others += int((differ & (np.asarray(info.accepted) > 1)).sum())
        for row, text in enumerate(texts_of(state)):
            draft = jax.tree.map(lambda x: np.asarray(x)[row], info.draft)  # noqa: B023
            for path in paths_of(draft):
                right = reference([*text, *draft.tokens[path].tolist()])[len(text) - 1 : -1]
                worst = max(worst, np.abs(draft.probs[path] - right).max())
    assert accepted, "no draft token was accepted: later rounds show nothing"
    assert others or rule == "chain", "every accepted path began with the first node"
    return worst


def error_of_probs(drafter, params, rounds=3):
    """The largest difference of ``Drafter.probs`` from the probs of first draft tokens.

    With the settings and penalties of the rows.
    """
    settings = {"temperature": [1.0, 0.6, 1.5, 0.8], "top_k": 20, "repetition_penalty": 1.6}
    probs, worst = jax.jit(drafter.probs), 0.0
    for state, info in played(drafter, params, rounds=rounds, vocab_size=32, **settings):
        context = Context(jnp.maximum(state.tokens, 0), state.length, state.sampling)
        given = np.asarray(probs(params, context))[np.arange(len(PROMPTS)), state.length - 1]
        worst = max(worst, np.abs(given - info.draft.probs[:, 0]).max())
    return worst


def with_inner(change):
    """``early_exit`` whose inner model is ``change(inner)``."""

    def make(target, **keys):
        inner = _exit_rounds.inner
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_exit_rounds, "inner", lambda *args: change(inner(*args)))
            return drafters.make("early_exit", target, **keys)

    return make
