"""REST: the longest end of the text that something follows in a datastore; what did, as a tree. Deterministic, L1.

He et al. 2024 (2311.08252), card C4. The tree holds the most frequent beginnings of the continuations found. Where a phrase
occurs more often than is looked at, occurrences spread evenly over all of them are taken (the original takes those with the
smallest token ids), and its sampled mode, which is not lossless, is replaced by rules that are.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp

from specjax.checks import counts, ngrams
from specjax.data.datastore import Store
from specjax.drafters.lookup import _frequency, _memory
from specjax.drafters.lookup._suffix_array import continuing, find, follow, last_tokens, sample
from specjax.errors import UserError
from specjax.types import DETERMINISTIC, LM, Draft, Drafter


def make(
    target: LM,
    *,
    datastore: Store | str | os.PathLike,
    max_ngram: int = 16,
    min_ngram: int = 2,
    samples: int = 64,
    depth: int = 10,
    nodes: int = 64,
) -> Drafter:
    """Drafts by looking the end of the text up in a datastore.

    Args:
        target: the model to be accelerated; only its vocabulary is read.
        datastore: a ``Store``, or the directory of one (``configs/datastore.py`` builds it).
        max_ngram: longest phrase looked up, at most the store's reach. Continuations are sorted by what the reach leaves:
            it says how well the samples are spread.
        min_ngram: shortest phrase looked up; nothing is proposed if that does not occur.
        samples: occurrences looked at, K: the tree costs K^2 * depth comparisons.
        depth: longest continuation.
        nodes: size of the tree.

    Raises:
        UserError: numbers below 1, min_ngram > max_ngram > reach, a directory without a datastore for this target.
    """
    counts(nodes=nodes, depth=depth, samples=samples)
    ngrams(max_ngram, min_ngram)
    store = _memory.load(target, datastore, max_ngram)
    if store is None:
        raise UserError("rest needs a datastore; build one with configs/datastore.py")
    reach = store.reach

    def row(tokens, order, text, length):
        low, high = find(tokens, order, last_tokens(text, length, max_ngram), reach)
        count = jnp.arange(1, max_ngram + 1)
        size = jnp.max(
            jnp.where(continuing(tokens, order, low, high) & (count >= min_ngram), count, 0)
        )
        at = jnp.maximum(size - 1, 0)
        places = sample(order, low[at], high[at], samples)
        places = jnp.where((places >= 0) & (size > 0), places + size, -1)
        windows = follow(tokens, places, depth)
        return _frequency.tree(windows, jnp.ones((samples,), jnp.float32), nodes)

    def propose(params, keys, context, state):
        store = params.draft
        each = jax.vmap(row, (None, None, 0, 0))
        tokens, parents, valid, _ = each(
            store["tokens"], store["order"], context.tokens, context.length
        )
        return Draft(tokens, valid, parents, depth=min(depth, nodes)), state

    return Drafter(
        init_params=lambda key: {
            "tokens": jnp.asarray(store.tokens),
            "order": jnp.asarray(store.order),
        },
        init=lambda params, context, target_out, slots: (),
        propose=propose,
        update=lambda params, state, draft, verdict, target_out: state,
        nodes=nodes,
        name="rest",
        siblings=DETERMINISTIC,
        depth=min(depth, nodes),
    )
