"""SAM-Decoding: what followed the longest match of any length, in the row's text or in a datastore. Deterministic, L1.

Hu et al. 2024 (2411.10666), card C8. Each row has the suffix automaton of its own text, which grows by the new tokens in every
round; it knows the longest suffix of the text that occurred before, and where first. If fewer than ``gamma`` tokens follow
there, the next shorter match is asked, as long as one is left; if all are too late in the text, the longest match proposes
what there is. (The published code fills up with token 0 and counts it as drafted.) A datastore is used instead where its
match is longer by more than ``bias``. There the paper takes the first occurrence; here it is the middle one of those that a
suffix array has in the order of their continuations, which is the usual continuation wherever most of them agree.

The automaton reads on when the row proposes, so rounds of another drafter are caught up with; a row reads its own text only.
96 bytes a token of the buffer.

``prompt_lookup`` with a large ``max_ngram`` compares instead, which proposes nearly the same at a cost that grows with the
text, where this one's does not (experiments/draft_cost has both at 2048 tokens). But a prompt has to be read first, a token
at a time, which that study leaves out. So this is for long outputs over long contexts; an accelerator, which pays for every
small step and reads memory fast, may favour comparing: that is not measured.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.checks import counts, whole
from specjax.drafters.lookup import _automaton, _memory
from specjax.drafters.lookup._suffix_array import continuing, find, follow, last_tokens, sample
from specjax.errors import UserError
from specjax.types import LM, Draft, Drafter


def make(
    target: LM,
    *,
    gamma: int = 15,
    min_match: int = 1,
    max_ngram: int = 16,
    bias: int = 5,
    datastore: _memory.Given = None,
    memory: int = 65536,
) -> Drafter:
    """Drafts a chain from the longest match.

    Args:
        target: the model to be accelerated; only its vocabulary is read.
        gamma: tokens drafted at the most (the original's n_predicts).
        min_match: no shorter match is used. The paper's 5 goes with another drafter behind it (``escalate``).
        max_ngram: longest match looked for in the datastore; in the row's own text there is no limit.
        bias: by how many tokens a match in the datastore must be longer to go before one in the row's own text.
        datastore: texts to begin with: a ``Store`` or the directory of one.
        memory: tokens of earlier outputs kept, beside the datastore, when it learns.

    Raises:
        UserError: numbers out of range, min_match > max_ngram, a datastore of another tokenizer.
    """
    counts(gamma=gamma, min_match=min_match, max_ngram=max_ngram)
    whole("bias", bias, 0)
    if min_match > max_ngram:
        raise UserError(
            f"min_match is {min_match} and max_ngram {max_ngram}: a datastore could never match; raise it"
        )
    store = _memory.load(target, datastore, max_ngram)
    reach = _memory.reach(store, max_ngram)

    def own(text, length, end, size):
        place = end + jnp.arange(gamma)
        return jnp.where((place < length) & (size > 0), jnp.take(text, place, mode="clip"), -1)

    def others(tokens, order, text, length):
        """i32[gamma] the datastore's continuation, -1 where it has none, and i32[] how long its match is."""
        low, high = find(tokens, order, last_tokens(text, length, max_ngram), reach)
        sizes = jnp.arange(1, max_ngram + 1)
        last = jnp.take(order, jnp.maximum(high - 1, 0))  # it goes on if any of them does
        size = jnp.max(
            jnp.where(continuing(tokens, order, low, high) & (sizes >= min_match), sizes, 0)
        )
        at = jnp.maximum(size - 1, 0)
        middle = sample(order, low[at], high[at], 1)[0] + size
        start = jnp.where(
            jnp.take(tokens, middle, mode="fill", fill_value=-1) >= 0, middle, last[at] + size
        )
        return follow(tokens, jnp.where(size > 0, start, -1)[None], gamma)[0], size

    def propose(params, keys, context, automaton):
        automaton = _automaton.extend(automaton, context.tokens, context.length)
        found = _automaton.occurrence(automaton, gamma, min_match)
        tokens = jax.vmap(own)(context.tokens, context.length, found.end, found.longest)
        if params.draft:
            store = params.draft["tokens"], params.draft["order"]
            more, size = jax.vmap(others, (None, None, 0, 0))(
                *store, context.tokens, context.length
            )
            mine = (found.longest > 0) & (found.longest >= size - bias)
            tokens = jnp.where(mine[:, None], tokens, more)
        return Draft(jnp.maximum(tokens, 0), tokens >= 0), automaton

    return Drafter(
        init_params=lambda key: _memory.params(store),
        init=lambda params, context, target_out, slots: _automaton.extend(
            _automaton.empty(context.length.shape[0], slots), context.tokens, context.length
        ),
        propose=propose,
        update=lambda params, state, draft, verdict, target_out: state,
        nodes=gamma,
        name="sam",
        learn=_memory.learner(store, max_ngram, memory),
    )
