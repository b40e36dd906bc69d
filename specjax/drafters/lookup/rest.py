"""REST: looks up the end of the text in a datastore and proposes its continuations as a tree.

Deterministic, L1. He et al. 2024 (2311.08252). The longest end of the text that occurs with a
continuation is used, and the tree holds the most frequent prefixes of the continuations. Where a
phrase occurs more than ``samples`` times, occurrences spread evenly over all of them are taken (the
original takes those with the smallest token ids). The original's sampled mode is not lossless; here
the acceptance rules replace it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import counts, ngrams
from specjax.data.datastore import Store
from specjax.drafters._limited import limited
from specjax.drafters.lookup import _frequency, _memory
from specjax.drafters.lookup._suffix_array import follow, longest_match, sample
from specjax.errors import UserError
from specjax.types import DETERMINISTIC, LM, Draft, Drafter

REFERENCE = "he2024rest"


class Settings(NamedTuple):
    """Static settings; see ``make``."""

    max_ngram: int
    min_ngram: int
    samples: int
    depth: int
    nodes: int
    reach: int  # of the datastore


def make(
    target: LM,
    *,
    datastore: Store | str | os.PathLike,
    max_ngram: int = 16,
    min_ngram: int = 2,
    samples: int = 64,
    depth: int = 10,
    nodes: int = 64,
    control: str = "",
) -> Drafter:
    """Drafts by looking up the end of the text in a datastore.

    Args:
        target: the model to be accelerated; only its vocabulary is read.
        datastore: a ``Store``, or its directory (``configs/datastore.py`` builds it).
        max_ngram: longest phrase looked up, at most the store's reach. The continuations of a
            phrase of n tokens are sorted by their first ``reach - n`` tokens, which determines how
            evenly the samples are spread.
        min_ngram: shortest phrase looked up; no token is proposed if it does not occur.
        samples: K, occurrences used; the tree costs K^2 * depth comparisons.
        depth: longest continuation.
        nodes: size of the tree.
        control: limits the drafts by what earlier rounds accepted; see ``control.parse``.

    Raises:
        UserError: numbers below 1, min_ngram > max_ngram, max_ngram > reach, a directory without a
            datastore for this target.
    """
    counts(nodes=nodes, depth=depth, samples=samples)
    ngrams(max_ngram, min_ngram)
    store = _memory.load(target, datastore, max_ngram)
    if store is None:
        raise UserError("rest needs a datastore; build one with configs/datastore.py")
    settings = Settings(max_ngram, min_ngram, samples, depth, nodes, store.reach)
    drafter = Drafter(
        init_params=lambda key: _memory.params(store),
        init=_memory.no_state,
        propose=Bound(_propose, settings),
        update=_memory.unchanged,
        nodes=nodes,
        name="rest",
        siblings=DETERMINISTIC,
        depth=min(depth, nodes),
    )
    return limited(drafter, control)


def _propose(settings: Settings, params, keys, context, state):
    store = params.draft
    each = jax.vmap(Bound(_tree, settings), (None, None, 0, 0))
    tree = each(store["tokens"], store["order"], context.tokens, context.length)
    depth = min(settings.depth, settings.nodes)
    return Draft(tree.tokens, tree.valid, tree.parents, depth=depth), state


def _tree(settings: Settings, tokens, order, text, length) -> _frequency.Tree:
    match = longest_match(
        tokens,
        order,
        text,
        length,
        max_ngram=settings.max_ngram,
        min_ngram=settings.min_ngram,
        reach=settings.reach,
    )
    places = sample(order, match.low, match.high, settings.samples)
    places = jnp.where((places >= 0) & (match.size > 0), places + match.size, -1)
    windows = follow(tokens, places, settings.depth)
    weights = jnp.ones((settings.samples,), jnp.float32)
    return _frequency.tree(windows, weights, settings.nodes)
