"""The lookahead trie of PIA: what followed the end of the text earlier, as a tree. L1.

Zhao et al. 2023 (2312.12728). The text itself and earlier outputs are searched. The original keeps
a trie of windows per token, with one frequency for the prompt ("input") and one for outputs
("output"), and weighs them (1 - output_weight) : output_weight. The frequencies of a trie are
counts of occurrences. Here the occurrences are counted directly: in the row's own buffer by
comparing, and in the outputs of earlier rows, if there are any, with a suffix array. No structure
grows on the device, and no entry is evicted by halving counts.

In the row's own text the longest n-gram is used that has enough continuations to fill a branch
(``depth`` nodes); in earlier outputs the longest n-gram that a token follows. The heaviest prefixes
of all these continuations are the tree.

Without ``datastore`` and ``warm`` a row searches its own text only. The published numbers of this
method are of a filled trie: give a ``datastore``, or let the drafter learn (``warm``), and report
this with the result.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters.lookup import _frequency, _match, _memory
from specjax.drafters.lookup._match import Sizes
from specjax.drafters.shared_keys import DatastoreKeys
from specjax.types import LM, Array, Drafter

REFERENCE = "zhao2024lookahead"


class Keys(DatastoreKeys):
    """The keys of ``trie``."""

    LENGTH = "depth"

    nodes: int = key(64, "size of the tree (the original's decoding_length)", least=1)
    depth: int = key(12, "longest branch (branch_length)", least=1)
    max_ngram: int = key(8, "longest n-gram matched")
    min_ngram: int = key(1, "shortest n-gram matched")
    samples: int = key(
        32,
        "occurrences used in the row's own text (the longest matches, the latest first), and in "
        "earlier outputs",
        least=1,
    )
    output_weight: float = key(
        1e-4,
        "weight of an occurrence in an output, in (0, 1); in a prompt it is 1 - output_weight",
        above=0,
        below=1,
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts a tree from frequencies.

    Raises:
        UserError: numbers below 1, min_ngram > max_ngram, output_weight outside (0, 1), a datastore
            of another tokenizer.
    """
    store = _memory.load(target, keys.datastore, keys.max_ngram)
    sizes = Sizes(keys.max_ngram, keys.min_ngram, _memory.reach(store, keys.max_ngram))
    row, depth = Bound(_tree, keys.settings(), sizes), min(keys.depth, keys.nodes)
    # Occurrences in the prompt and in the output have different weights.
    more = {"init": _memory.prompt_length, "history": True}
    return _memory.drafter("trie", keys, store, row, keys.nodes, depth, **more)


def _tree(settings: Keys, sizes: Sizes, store, text, length, prompt_length) -> tuple:
    shape = settings.samples, settings.depth
    windows, weights = _own(settings, sizes, text, length, prompt_length)
    if store:
        stored, real, match = _match.stored_continuations(store, text, length, sizes, *shape)
        # Each sample counts for an equal part of all occurrences.
        part = (match.high - match.low) / jnp.maximum(real.sum(), 1)
        windows = jnp.concatenate([windows, stored])
        weights = jnp.concatenate([weights, jnp.where(real, settings.output_weight * part, 0)])
    return _frequency.tree(windows, weights.astype(jnp.float32), settings.nodes)[:3]


def _own(settings: Keys, sizes: Sizes, text, length, prompt_length) -> tuple[Array, Array]:
    """Continuations in the row's own text, i32[K,D], and their weights f32[K]."""
    shape = settings.samples, settings.depth
    windows, ends, runs = _match.own_continuations(text, length, sizes, *shape)
    # The longest runs come first. So the occurrences of an n-gram are the first few, and a prefix
    # that is new among all occurrences is new among these.
    new = _frequency.prefixes(windows).is_first.sum(-1)
    lengths = jnp.arange(1, settings.max_ngram + 1)
    # [M] nodes for each n-gram length
    total = jnp.where(runs >= lengths[:, None], new, 0).sum(-1)
    size = jnp.max(jnp.where(total >= settings.depth, lengths, 0))
    weight = jnp.where(ends < prompt_length, 1 - settings.output_weight, settings.output_weight)
    return windows, jnp.where((runs > 0) & (runs >= size), weight, 0)
