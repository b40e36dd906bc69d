"""Prompt lookup: the last n tokens occurred before; propose what followed them. Deterministic, no weights, L1.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding), card C2. The longest n-gram from ``max_ngram`` to ``min_ngram``
that occurs wins. Matching looks at prompt and output alike. ``rule`` names the settings of known programs; what they do:

================  =====  ====  ===  ========  =====================================================
rule              gamma  max   min  match     a continuation
================  =====  ====  ===  ========  =====================================================
"specjax"         10     3     1    earliest  may be shorter than gamma
"original"        10     3     1    earliest  must have gamma tokens, and begin before the n-gram itself
"transformers"    10     2     1    earliest  may be shorter than gamma
"vllm"            5      5     5    earliest  may be shorter than gamma
================  =====  ====  ===  ========  =====================================================

(transformers also cuts a draft before an end-of-sequence token; here the decode loop does, after the verdict. vLLM leaves gamma
to its user.)
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import ngrams, one_of, whole, yes_or_no
from specjax.drafters.lookup import _match
from specjax.types import LM, Draft, Drafter

_OURS: dict[str, Any] = {
    "gamma": 10,
    "max_ngram": 3,
    "min_ngram": 1,
    "match": "earliest",
    "partial": True,
    "overlap": True,
}
RULES: dict[str, dict[str, Any]] = {
    "specjax": _OURS,
    "original": _OURS | {"partial": False, "overlap": False},
    "transformers": _OURS | {"max_ngram": 2},
    "vllm": _OURS | {"gamma": 5, "max_ngram": 5, "min_ngram": 5},
}


def lookup(
    tokens: jax.Array,
    length: jax.Array,
    *,
    gamma: int,
    max_ngram: int,
    min_ngram: int = 1,
    match: str = "earliest",
    partial: bool = True,
    overlap: bool = True,
    skip: bool = False,
    periodic: bool = False,
):
    """Finds one row's continuation: tokens i32[S], length i32[] -> (i32[gamma], valid bool[gamma]). O(max_ngram * S)."""
    slots = tokens.shape[0]
    end = jnp.arange(slots)  # a match ends before slot ``end``, where its continuation begins

    def found(run):
        run = jnp.where(end + (1 if partial else gamma) <= length, run, 0)
        if not overlap:
            run = jnp.minimum(run, length - 1 - end)
        return jnp.where(run >= min_ngram, run, 0)

    run = found(_match.own_runs(tokens, length, max_ngram))
    if skip:  # the n-gram before the newest token, and one token passed over; only where nothing else is found
        before = jnp.roll(_match.own_runs(tokens, length - 1, max_ngram), 1).at[0].set(0)
        run = jnp.where(run.max() > 0, run, found(jnp.where(end < length, before, 0)))
    best = run.max()
    hit = (run == best) & (best > 0)
    start = jnp.argmax(hit) if match == "earliest" else slots - 1 - jnp.argmax(hit[::-1])
    ahead = jnp.arange(gamma)
    if periodic:  # the text goes on as it did since ``start``: what would follow its end is its beginning again
        ahead = ahead % jnp.maximum(length - start, 1)
    place = start + ahead
    return jnp.take(tokens, place, mode="clip"), (place < length) & (best > 0)


def make(
    target: LM,
    *,
    gamma: int | None = None,
    max_ngram: int | None = None,
    min_ngram: int | None = None,
    match: str | None = None,
    partial: bool | None = None,
    rule: str = "specjax",
    skip: bool = False,
    periodic: bool = False,
) -> Drafter:
    """Drafts by looking up the last n-gram.

    Args:
        target: any model; only its vocabulary's size is read.
        gamma: longest continuation proposed. None, here and below: as ``rule`` says.
        max_ngram: longest n-gram looked for; shorter ones are tried down to ``min_ngram``.
        min_ngram: shortest n-gram looked for.
        match: which occurrence of the longest n-gram to take, "earliest" (the original) or "latest".
        partial: whether a continuation shorter than gamma may be proposed.
        rule: the settings of a known program: "specjax", "original", "transformers" or "vllm".
        skip: whether to look up the n-gram before the newest token where the last n-gram never occurred, passing over one
            token of the copied text: a copy with one word changed goes on.
        periodic: whether a continuation that reaches the end of the text goes on from its own beginning.

    Raises:
        UserError: gamma or an n-gram length below 1, max_ngram below min_ngram, unknown ``match`` or ``rule``.
    """
    one_of("rule", rule, tuple(RULES))
    given = {
        "gamma": gamma,
        "max_ngram": max_ngram,
        "min_ngram": min_ngram,
        "match": match,
        "partial": partial,
    }
    keys = RULES[rule] | {name: value for name, value in given.items() if value is not None}
    whole("gamma", keys["gamma"], 1)
    ngrams(keys["max_ngram"], keys["min_ngram"])
    one_of("match", keys["match"], ("earliest", "latest"))
    for name, value in (("partial", keys["partial"]), ("skip", skip), ("periodic", periodic)):
        yes_or_no(name, value)
    return _make(target, skip=skip, periodic=periodic, **keys)


@functools.cache  # equal arguments, the same drafter: nothing is compiled twice
def _make(target: LM, *, gamma: int, **keys: Any) -> Drafter:
    find = functools.partial(lookup, gamma=gamma, **keys)

    def propose(params, keys, context, state):
        tokens, valid = jax.vmap(find)(context.tokens, context.length)
        return Draft(tokens=tokens, valid=valid), state

    def probs(params, context):
        def row(tokens):
            found, valid = jax.vmap(lambda n: find(tokens, n))(jnp.arange(1, tokens.shape[0] + 1))
            return jax.nn.one_hot(
                jnp.where(valid[:, 0], found[:, 0], -1), target.vocab_size
            )  # -1: no mass at all

        return jax.vmap(row)(context.tokens)

    return Drafter(
        init_params=lambda key: {},
        init=lambda params, context, target_out, slots: (),
        propose=propose,
        update=lambda params, state, draft, verdict, target_out: state,
        nodes=gamma,
        name="prompt_lookup",
        probs=probs,
    )
