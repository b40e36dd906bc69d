"""Prompt lookup: proposes what followed an earlier occurrence of the text's last n tokens.

Deterministic, no weights, L1. Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding). Of the
n-grams from ``max_ngram`` down to ``min_ngram`` tokens the longest that occurs earlier is used.
Prompt and output are both searched. ``rule`` selects the settings of a known program:

================  =====  ====  ===  ========  ============================================
rule              gamma  max   min  match     a continuation
================  =====  ====  ===  ========  ============================================
"specjax"         10     3     2    earliest  may be shorter than gamma
"original"        10     3     1    earliest  has gamma tokens, begins before the n-gram
"transformers"    10     2     1    earliest  may be shorter than gamma
"vllm"            5      5     5    earliest  may be shorter than gamma
================  =====  ====  ===  ========  ============================================

One equal token is weak evidence: its continuation is rejected so often that verifying it costs more
than it gains, unless a wide pass costs as little as a narrow one.

(transformers also cuts a draft before an end-of-sequence token; here the decode loop cuts after the
verdict. vLLM has no default for gamma.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.checks import ngrams
from specjax.declare import key
from specjax.drafters._limited import limited
from specjax.drafters.lookup import _match
from specjax.drafters.shared_keys import LimitedKeys
from specjax.errors import UserError
from specjax.types import LM, Array, Draft, Drafter, Rare

REFERENCE = "saxena2023prompt"

_SETTINGS = ("gamma", "max_ngram", "min_ngram", "match", "partial", "overlap")
RULES: dict[str, dict[str, Any]] = {
    rule: dict(zip(_SETTINGS, values, strict=True))
    for rule, values in (
        ("specjax", (10, 3, 2, "earliest", True, True)),
        ("original", (10, 3, 1, "earliest", False, False)),
        ("transformers", (10, 2, 1, "earliest", True, True)),
        ("vllm", (5, 5, 5, "earliest", True, True)),
    )
}


def lookup(
    tokens: Array,
    length: Array,
    *,
    gamma: int,
    max_ngram: int,
    min_ngram: int = 1,
    match: str = "earliest",
    partial: bool = True,
    overlap: bool = True,
    skip: bool = False,
    periodic: bool = False,
) -> tuple[Array, Array]:
    """The continuation of one row, (tokens i32[gamma], valid bool[gamma]). O(max_ngram * S).

    Args:
        tokens, length: the text, i32[S] and i32[].
        gamma, max_ngram, min_ngram, match, partial, skip, periodic: see ``make``.
        overlap: whether a continuation may begin inside the last n-gram itself.
    """
    # A match ends before slot ``end``, where its continuation begins.
    end = jnp.arange(tokens.shape[0])

    def usable(run):
        run = jnp.where(end + (1 if partial else gamma) <= length, run, 0)
        if not overlap:
            run = jnp.minimum(run, length - 1 - end)
        return jnp.where(run >= min_ngram, run, 0)

    run = usable(_match.own_runs(tokens, length, max_ngram))
    if skip:
        # The n-gram before the newest token, followed by any one token.
        before = jnp.roll(_match.own_runs(tokens, length - 1, max_ngram), 1).at[0].set(0)
        run = jnp.where(run.max() > 0, run, usable(jnp.where(end < length, before, 0)))
    start, found = _match.pick(run, match)
    ahead = jnp.arange(gamma)
    if periodic:
        # The text is assumed to repeat with the period ``length - start``.
        ahead = ahead % jnp.maximum(length - start, 1)
    place = start + ahead
    return jnp.take(tokens, place, mode="clip"), (place < length) & found


class Keys(LimitedKeys):
    """The keys of ``prompt_lookup``."""

    gamma: int | None = key(None, "longest continuation proposed", least=1)
    max_ngram: int | None = key(
        None, "longest n-gram searched; shorter ones are tried down to ``min_ngram``"
    )
    min_ngram: int | None = key(
        None,
        'shortest n-gram searched. With rule "specjax" 2, or 1 if ``max_ngram`` is given and this'
        " key is not",
    )
    match: str | None = key(
        None,
        'which occurrence of the longest n-gram is used, "earliest" (the original) or "latest"',
        choices=("earliest", "latest"),
    )
    partial: bool | None = key(None, "whether a continuation shorter than gamma may be proposed")
    rule: str = key("specjax", "the settings of a known program", choices=tuple(RULES))
    skip: bool = key(
        False,
        "where the last n-gram has no earlier occurrence, whether to look up the n-gram before "
        "the newest token and to skip one token of the copied text (one changed word)",
    )
    periodic: bool = key(
        False,
        "whether a continuation that reaches the end of the text is repeated from its beginning; "
        "needs ``partial``",
    )

    def check(self) -> None:
        chosen = self.chosen()
        ngrams(chosen["max_ngram"], chosen["min_ngram"])
        if self.periodic and not chosen["partial"]:
            raise UserError(
                "periodic is True and partial False: a continuation of gamma tokens never reaches "
                "the end of the text; allow partial ones, or leave periodic out"
            )

    def chosen(self) -> dict[str, Any]:
        """The settings of ``rule`` with the keys that are given."""
        rule: dict[str, Any] = dict(RULES[self.rule])
        if self.rule == "specjax" and self.max_ngram is not None:
            rule["min_ngram"] = 1
        given = {name: getattr(self, name, None) for name in rule}
        return rule | {name: value for name, value in given.items() if value is not None}


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts by looking up the last n-gram.

    For gamma, max_ngram, min_ngram, match and partial, None takes the value of ``rule``.

    Raises:
        UserError: gamma or an n-gram length below 1, max_ngram below min_ngram,
            unknown ``match`` or ``rule``, ``periodic`` without ``partial``.
    """
    chosen = keys.chosen()
    find = Bound(lookup, skip=keys.skip, periodic=keys.periodic, **chosen)
    gamma = chosen["gamma"]
    # The text goes on for gamma tokens behind most first occurrences, but not behind latest ones.
    whole = chosen["match"] == "earliest" or keys.periodic or not chosen["partial"]
    drafter = Drafter(
        propose=Bound(_propose, find),
        nodes=gamma,
        name="prompt_lookup",
        probs=Bound(_probs, find, target.vocab_size),
        rare=Rare(lengths=(gamma,) if whole else ()),
    )
    return limited(drafter, keys.control)


def _propose(find, params, keys, context, state):
    tokens, valid = jax.vmap(find)(context.tokens, context.length)
    return Draft(tokens=tokens, valid=valid), state


def _probs(find, vocab_size: int, params, context):
    def row(tokens):
        lengths = jnp.arange(1, tokens.shape[0] + 1)
        drafted, valid = jax.vmap(lambda length: find(tokens, length))(lengths)
        # one_hot(-1) is 0 everywhere: no draft token.
        return jax.nn.one_hot(jnp.where(valid[:, 0], drafted[:, 0], -1), vocab_size)

    return jax.vmap(row)(context.tokens)
