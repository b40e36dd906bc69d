"""Sparse views of a cache: a part of the committed text, in buffers of a constant size.

A view copies some keys and values of the target's cache; a model that reads it instead of the cache
takes the same time after a text of any length. Keys were rotated at their true positions and stay
so, and new tokens have their true positions too. Layers with a sliding window keep their own ring.
The buffers are small and are carried from round to round: a round adds the newest tokens to them,
which costs the same after a text of any length. Only choosing tokens by their keys (``snapkv``
once, ``retrieval`` every few rounds) reads the whole cache.

- ``view``: what all views share.
- ``ring``: the first tokens, or those that the prompt attends to most, and the most recent ones;
  and a model whose own cache has the first and the most recent tokens only.
- ``retrieval``: the chunks whose mean keys fit the newest query, chosen again every few rounds.
"""

from specjax.sparse_views.retrieval import retrieval
from specjax.sparse_views.ring import snapkv, streaming, streaming_model
from specjax.sparse_views.view import View

__all__ = ["View", "retrieval", "snapkv", "streaming", "streaming_model"]
