"""SAM-Decoding: proposes what followed the longest match, in the row's text or in a datastore.

Deterministic, L1. Hu et al. 2024 (2411.10666). Each row has the suffix automaton of its own text,
which grows by the new tokens in every round. The automaton gives the longest suffix of the text
that occurred before, and its first occurrence. If fewer than ``gamma`` tokens follow there, shorter
matches are tried in turn; if no match has that many, the longest match proposes the tokens there
are. (The published code fills up with token 0 and counts it as drafted.) A match in the datastore
is used if it is longer by more than ``bias`` tokens. The paper takes its first occurrence. Here it
is the middle one in the suffix array's order of continuations: where most of the continuations
agree, it is the most frequent one.

The automaton reads new tokens when the row proposes, which includes those of rounds of other
drafters. A row reads its own text only. Memory: 96 bytes per token of the buffer.

``prompt_lookup`` with a large ``max_ngram`` compares instead. It proposes nearly the same tokens,
and its cost grows with the text, while the cost of this method does not (experiments/draft_cost
measures both at 2048 tokens). But the automaton has to read the prompt first, token by token, which
that study excludes. So this method is for long outputs after long contexts. Accelerators pay for
every small step and read memory fast, which may favour comparing; that is not measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import counts, whole
from specjax.drafters._keys import DatastoreKeys
from specjax.drafters._limited import limited
from specjax.drafters.lookup import _automaton, _memory
from specjax.drafters.lookup._suffix_array import follow, longest_match, sample
from specjax.errors import UserError
from specjax.types import LM, Draft, Drafter

REFERENCE = "hu2025sam"

SHARED = DatastoreKeys


class Settings(NamedTuple):
    """Static settings; see ``make``."""

    gamma: int
    min_match: int
    max_ngram: int
    bias: int
    reach: int  # of the datastore


def make(
    target: LM,
    *,
    gamma: int = 15,
    min_match: int = 2,
    max_ngram: int = 16,
    bias: int = 5,
    **shared: Any,
) -> Drafter:
    """Drafts a chain from the longest match.

    Args:
        target: the model to be accelerated; only its vocabulary is read.
        gamma: most tokens drafted (the original's n_predicts).
        min_match: shorter matches are not used. The paper uses 5 together with another drafter
            (``escalate``). With 1, most drafts follow a single equal token and are rejected.
        max_ngram: longest match in the datastore (or in what was learnt; with neither, this key and
            ``bias`` have no effect); matches in the row's own text have no limit.
        bias: a match in the datastore is used if it is longer than the match in the row's own text
            by more than this number of tokens.
        shared: ``DatastoreKeys``.

    Raises:
        UserError: numbers out of range, min_match > max_ngram, a datastore of another tokenizer.
    """
    keys = DatastoreKeys(**shared)
    counts(gamma=gamma, min_match=min_match, max_ngram=max_ngram)
    whole("bias", bias, 0)
    if min_match > max_ngram:
        raise UserError(
            f"min_match is {min_match} and max_ngram {max_ngram}: "
            "a datastore could never match; raise max_ngram"
        )
    store = _memory.load(target, keys.datastore, max_ngram)
    reach = _memory.reach(store, max_ngram)
    settings = Settings(gamma, min_match, max_ngram, bias, reach)
    drafter = Drafter(
        init_params=lambda key: _memory.params(store),
        init=_init,
        propose=Bound(_propose, settings),
        update=_memory.unchanged,
        nodes=gamma,
        name="sam",
        learn=_memory.learner(store, max_ngram, keys.memory),
    )
    return limited(drafter, keys.control)


def _init(params, context, target_out, slots):
    automaton = _automaton.empty(context.length.shape[0], slots)
    return _automaton.extend(automaton, context.tokens, context.length)


def _propose(settings: Settings, params, keys, context, automaton):
    text = context.tokens, context.length
    automaton = _automaton.extend(automaton, *text)
    match = _automaton.occurrence(automaton, settings.gamma, settings.min_match)
    own = Bound(_own, settings.gamma)
    tokens = jax.vmap(own)(*text, match.end, match.longest)
    if params.draft:
        stored = jax.vmap(Bound(_stored, settings), (None, None, 0, 0))
        others, size = stored(params.draft["tokens"], params.draft["order"], *text)
        use_own = (match.longest > 0) & (match.longest >= size - settings.bias)
        tokens = jnp.where(use_own[:, None], tokens, others)
    return Draft(jnp.maximum(tokens, 0), tokens >= 0), automaton


def _own(gamma: int, text, length, end, size) -> jax.Array:
    """The continuation in the row's own text, i32[gamma], -1 after its end."""
    place = end + jnp.arange(gamma)
    return jnp.where((place < length) & (size > 0), jnp.take(text, place, mode="clip"), -1)


def _stored(settings: Settings, tokens, order, text, length) -> tuple[jax.Array, jax.Array]:
    """The datastore's continuation, i32[gamma], -1 after its end; the match's size, i32[]."""
    low, high, size = longest_match(
        tokens,
        order,
        text,
        length,
        max_ngram=settings.max_ngram,
        min_ngram=settings.min_match,
        reach=settings.reach,
    )
    middle = sample(order, low, high, 1)[0] + size
    # The middle one may be at the end of its document; then a token follows the last one.
    last = jnp.take(order, jnp.maximum(high - 1, 0)) + size
    followed = jnp.take(tokens, middle, mode="fill", fill_value=-1) >= 0
    start = jnp.where(followed, middle, last)
    return follow(tokens, jnp.where(size > 0, start, -1)[None], settings.gamma)[0], size
