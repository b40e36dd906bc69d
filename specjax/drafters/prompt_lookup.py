"""Prompt lookup: the last n tokens occurred before; propose what followed them. Deterministic, no weights, L1.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding), card C2. The longest n-gram from ``max_ngram`` to 1 that
occurs wins. Matching looks at prompt and output alike.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.drafters._checks import at_least, one_of
from specjax.types import LM, Draft, Drafter


def lookup(tokens: jax.Array, length: jax.Array, *, gamma: int, max_ngram: int, match: str, partial: bool):
    """Finds one row's continuation: tokens i32[S], length i32[] -> (i32[gamma], valid bool[gamma]). O(max_ngram * S)."""
    slots = tokens.shape[0]
    end = jnp.arange(slots)  # a match ends before slot ``end``, where its continuation begins
    matched, run = jnp.ones((slots,), bool), jnp.zeros((slots,), jnp.int32)
    for back in range(1, max_ngram + 1):
        behind = jnp.roll(tokens, back)  # behind[end] = tokens[end - back]
        matched &= (end >= back) & (behind == tokens[length - back]) & (length > back)
        run += matched
    needed = 1 if partial else gamma
    run = jnp.where(end + needed <= length, run, 0)
    best = run.max()
    hit = (run == best) & (best > 0)
    start = jnp.argmax(hit) if match == "earliest" else slots - 1 - jnp.argmax(hit[::-1])
    place = start + jnp.arange(gamma)
    return jnp.take(tokens, place, mode="clip"), (place < length) & (best > 0)


@functools.cache  # equal arguments, the same drafter: nothing is compiled twice
def make(target: LM, *, gamma: int = 10, max_ngram: int = 3, match: str = "earliest", partial: bool = True) -> Drafter:
    """Drafts by looking up the last n-gram.

    Args:
        target: any model; only its vocabulary's size is read.
        gamma: longest continuation proposed.
        max_ngram: longest n-gram looked for; shorter ones are tried down to 1.
        match: which occurrence of the longest n-gram to take, "earliest" (the original) or "latest".
        partial: whether a continuation shorter than gamma may be proposed; False is the original rule.

    Raises:
        UserError: gamma or max_ngram below 1, unknown ``match``.
    """
    at_least("gamma", gamma, 1)
    at_least("max_ngram", max_ngram, 1)
    one_of("match", match, ("earliest", "latest"))

    def propose(params, keys, context, state):
        def row(tokens, length):
            return lookup(tokens, length, gamma=gamma, max_ngram=max_ngram, match=match, partial=partial)

        tokens, valid = jax.vmap(row)(context.tokens, context.length)
        return Draft(tokens=tokens, valid=valid), state

    def law(params, context):
        def row(tokens):
            one = jax.vmap(lambda n: lookup(tokens, n, gamma=gamma, max_ngram=max_ngram, match=match, partial=partial))
            found, valid = one(jnp.arange(1, tokens.shape[0] + 1))
            return jax.nn.one_hot(jnp.where(valid[:, 0], found[:, 0], -1), target.vocab_size)  # -1: no mass at all

        return jax.vmap(row)(context.tokens)

    return Drafter(
        init_params=lambda key: {},
        init=lambda params, context, target_out, slots: (),
        propose=propose,
        update=lambda params, state, draft, verdict, target_out: state,
        nodes=gamma,
        name="prompt_lookup",
        law=law,
    )
