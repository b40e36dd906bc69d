"""REST: looks up the end of the text in a datastore and proposes its continuations as a tree.

Deterministic, L1. He et al. 2024 (2311.08252). The longest end of the text that occurs with a
continuation is used, and the tree holds the most frequent prefixes of the continuations. Where a
phrase occurs more than ``samples`` times, occurrences spread evenly over all of them are taken (the
original takes those with the smallest token ids). The original's sampled mode is not lossless; here
the acceptance rules replace it.
"""

from __future__ import annotations

import os

import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.data.datastore import Store
from specjax.declare import key
from specjax.drafters.lookup import _frequency, _memory
from specjax.drafters.lookup._match import Sizes, stored_continuations
from specjax.drafters.shared_keys import LimitedKeys
from specjax.errors import UserError
from specjax.types import LM, Drafter

REFERENCE = "he2024rest"


class Keys(LimitedKeys):
    """The keys of ``rest``."""

    LENGTH = "depth"

    datastore: Store | str | os.PathLike = key(
        help="a ``Store``, or its directory (``configs/datastore.py`` builds it)"
    )
    max_ngram: int = key(
        16,
        "longest phrase looked up, at most the store's reach. The continuations of a phrase of n "
        "tokens are sorted by their first ``reach - n`` tokens, which determines how evenly the "
        "samples are spread.",
    )
    min_ngram: int = key(2, "shortest phrase looked up; no token is proposed if it does not occur")
    samples: int = key(64, "K, occurrences used; the tree costs K^2 * depth comparisons", least=1)
    depth: int = key(10, "longest continuation", least=1)
    nodes: int = key(64, "size of the tree", least=1)


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts by looking up the end of the text in a datastore.

    Raises:
        UserError: numbers below 1, min_ngram > max_ngram, max_ngram > reach, a directory without a
            datastore for this target.
    """
    store = _memory.load(target, keys.datastore, keys.max_ngram)
    if store is None:
        raise UserError("rest needs a datastore; build one with configs/datastore.py")
    sizes = Sizes(keys.max_ngram, keys.min_ngram, store.reach)
    row, depth = Bound(_tree, keys.settings(), sizes), min(keys.depth, keys.nodes)
    return _memory.drafter("rest", keys, store, row, keys.nodes, depth)


def _tree(settings: Keys, sizes: Sizes, store, text, length, state) -> tuple:
    windows = stored_continuations(store, text, length, sizes, settings.samples, settings.depth)[0]
    return _frequency.tree(windows, jnp.ones((settings.samples,), jnp.float32), settings.nodes)[:3]
