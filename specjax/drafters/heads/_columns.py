"""The drafts of a network at every place of a text, side by side: its columns.

Column t is the draft that begins with token t + 1 pending, where each drafted token is the text's
own. Step 0 feeds slot t with the target's feature of token t. Step j, j from 1, feeds the position
t + j with token t + j + 1 and what the network computed for the same column in step j - 1. It
attends to the slots up to t of step 0 and to the steps 1..j of its own column, which is what a
drafter has in its cache and its block after j draft tokens. Step j predicts token t + j + 2.

So one pass over T slots for each step serves all places: the training-time test of EAGLE-3 (Li et
al. 2025, 2503.01840, section 3.2) and the harmonised context alignment of HASS (Zhang et al. 2024,
2408.15766, section 3.2), which writes the same drafts with shifted columns and without gradients
between the steps. EAGLE-1 has step 0 only.

A network of n modules in sequence has one for each of the steps 0..n-1: module k reads at slot t
what module k - 1 computed there, and its own slots up to t. The last one then continues as above.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from specjax import tree
from specjax.cache import KVBlock
from specjax.drafters.heads import _text
from specjax.drafters.heads._network import Fed, Network
from specjax.tree import Layout
from specjax.types import Batch, ModelParams


class Text(NamedTuple):
    """What all steps read."""

    tokens: jax.Array  # i32[B,T+1]
    layout: Layout  # of the T slots of step 0


def text(batch: Batch) -> Text:
    """The tokens of a batch, and how its slots attend inside their documents."""
    rows, size = batch.tokens.shape
    if batch.segments is None:
        return Text(batch.tokens, tree.chain_layout(rows, size - 1))
    return Text(batch.tokens, tree.segments(batch.segments[:, :-1]))


def step(
    network: Network,
    text: Text,
    number: int,
    params: ModelParams,
    features: jax.Array,
    before: tuple[KVBlock, ...],
) -> tuple[Fed, KVBlock]:
    """Step ``number`` of all columns: what the network computes, and its keys and values.

    ``features`` [B,T,D] are the target's (``Network.read``) for step 0, then ``Fed.feature`` of the
    step before. ``before`` has the keys and values of all steps before.
    """
    rows, size = features.shape[:2]
    tokens = _text.ahead(text.tokens, number + network.shift, size)
    module = min(number, network.modules - 1)
    again = number - module  # steps of this module that are in ``before``
    layout = tree.columns(text.layout, again) if again else text.layout
    block, which = tree.join(*before[module:]) if again else None, {"module": module}
    cache, which = network.init_cache(rows, 0), which if network.modules > 1 else {}
    return network.apply(params, tokens, features, cache, layout, block, **which)
