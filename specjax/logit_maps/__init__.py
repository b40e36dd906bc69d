"""Penalties, biases and bans: maps of logits that depend on the text before a token.

They change the target: speculative decoding is lossless with respect to the mapped target. So the
same function is applied to the logits of the target and of the draft, at each node with the tokens
of its own path (``mapped``, ``for_draft``).

The order of the maps is that of vLLM: end-of-sequence ids before the minimum number of new tokens,
bias and bans; then the repetition, the frequency and the presence penalty; then the temperature and
the cut-offs of ``specjax.sampling``.

- ``settings``: the settings of each row, and their checks.
- ``apply``: the maps.
"""

from specjax.logit_maps.apply import Text, along_text, for_draft, mapped, read
from specjax.logit_maps.settings import LogitMaps, check, make

__all__ = ["LogitMaps", "Text", "along_text", "check", "for_draft", "make", "mapped", "read"]
