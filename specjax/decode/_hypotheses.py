"""Beam search without a model: the beams of a text, its finished hypotheses, and when it ends.

Shapes: B rows, K beams, N tokens that an output may have, E end-of-sequence tokens. The rules are
those of ``generate(num_beams=K)`` of transformers 5 (``GenerationMixin._beam_search``):

- The candidates of a step are the K * max(2, 1 + E) best continuations of all beams, so at least K
  of them do not end.
- Those that end are finished if they are among the first K. The score of a finished hypothesis is
  its log-probability divided by n ** length_penalty, n its number of new tokens with the last one.
- The K best finished hypotheses are kept, and the K best candidates that do not end go on.
- A text ends when the best beam, if it ended now, would be below all K finished hypotheses. The
  length in this test is n, or with ``early_stopping="never"`` and a positive penalty the largest
  one. With ``early_stopping=True`` it also ends as soon as there are K finished hypotheses.
- At the length limit the first K candidates are finished.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sampling

# The score of a place without a beam or a hypothesis.
NONE = -1e9


class Rules(struct.PyTreeNode):
    """When hypotheses end and how they are compared; arrays, so that others do not recompile."""

    stop: jax.Array  # i32[E]
    # f32[N+1]: the divisor of a log-probability of n tokens, and that of the best beam in the test
    # whether it could still be better than the finished hypotheses.
    divisor: jax.Array
    best_divisor: jax.Array
    early: jax.Array  # bool[]: whether K finished hypotheses end a text


class Hypotheses(struct.PyTreeNode):
    """The beams of each row after ``steps`` tokens, and its finished hypotheses, best first."""

    tokens: jax.Array  # i32[B,K,N] of the beams, -1 from place ``steps`` on
    scores: jax.Array  # f32[B,K] log-probabilities
    steps: jax.Array  # i32[B]
    finished: jax.Array  # bool[B,K]: whether there is a hypothesis
    ended: jax.Array  # i32[B,K,N] its tokens, -1 after the last one
    ended_scores: jax.Array  # f32[B,K]
    done: jax.Array  # bool[B]: nothing changes any more


def rules(stop: jax.Array, most: int, length_penalty: float, early_stopping: bool | str) -> Rules:
    """The rules for outputs of at most ``most`` tokens."""
    length = np.arange(most + 1).clip(1).astype(np.float64)
    divisor = length**length_penalty
    far = early_stopping == "never" and length_penalty > 0
    best_divisor = np.full_like(divisor, divisor[-1]) if far else divisor
    now, best = (jnp.asarray(each, float) for each in (divisor, best_divisor))
    return Rules(stop, now, best, jnp.asarray(early_stopping is True))


def start(batch: int, beams: int, most: int, dtype) -> Hypotheses:
    """One beam without tokens in each row; the others do not exist."""
    nothing = jnp.full((batch, beams, most), -1, jnp.int32)
    none = jnp.full((batch, beams), NONE, dtype)
    return Hypotheses(
        tokens=nothing,
        scores=none.at[:, 0].set(0),
        steps=jnp.zeros((batch,), jnp.int32),
        finished=jnp.zeros((batch, beams), bool),
        ended=nothing,
        ended_scores=none,
        done=jnp.zeros((batch,), bool),
    )


def step(
    own: Hypotheses, logprobs: jax.Array, rules: Rules
) -> tuple[Hypotheses, jax.Array, jax.Array]:
    """The beams with one token more; i32[B,K] each: the beam that one continues, and its new token.

    ``logprobs`` f32[B,K,V]: of the next token of each beam. The caller keeps rows that are done.
    """
    (batch, beams, vocab), most = logprobs.shape, own.tokens.shape[2]
    kept = beams * max(2, 1 + len(rules.stop))
    scores = (logprobs + own.scores[..., None]).reshape(batch, beams * vocab)
    scores, place = sampling.top(scores, kept)
    parent, token = place // vocab, place % vocab
    tokens = of(own.tokens, parent)
    here = jnp.arange(most) == own.steps[:, None, None]
    tokens = jnp.where(here, token[..., None], tokens)
    count = own.steps + 1
    ends = (token[..., None] == rules.stop).any(-1) | (count == most)[:, None]
    # The beams that go on.
    running, first = sampling.top(jnp.where(ends, scores + NONE, scores), beams)
    after = own.replace(tokens=of(tokens, first), scores=running, steps=count)
    after = _finish(after, tokens, scores, ends & (jnp.arange(kept) < beams), rules)
    # Whether a beam could still become better than a finished hypothesis.
    best = running[:, 0] / rules.best_divisor[count].astype(running.dtype)
    better = best > after.ended_scores.min(-1)
    full = after.finished.all(-1)
    after = after.replace(done=(count == most) | ~better | rules.early & full)
    parent, token = (jnp.take_along_axis(each, first, 1) for each in (parent, token))
    return after, parent, token


def _finish(
    own: Hypotheses, tokens: jax.Array, scores: jax.Array, ends: jax.Array, rules: Rules
) -> Hypotheses:
    """The best of the finished hypotheses and of the candidates ``ends`` bool[B,C]."""
    scores = scores / rules.divisor[own.steps][:, None].astype(scores.dtype)
    scores = jnp.concatenate([own.ended_scores, jnp.where(ends, scores, scores + NONE)], 1)
    best, which = sampling.top(scores, own.scores.shape[1])
    every = jnp.concatenate([own.finished, ends], 1)
    return own.replace(
        ended=of(jnp.concatenate([own.ended, tokens], 1), which),
        ended_scores=best,
        finished=jnp.take_along_axis(every, which, 1),
    )


def of(rows: jax.Array, which: jax.Array) -> jax.Array:
    """[B,n,...]: the rows [B,m,...] of these numbers i32[B,n]."""
    return jnp.take_along_axis(rows, which.reshape(*which.shape, *[1] * (rows.ndim - 2)), 1)
