"""A smaller language model drafts: a chain, or a tree of any shape, from its own cache.

L1 with the rule "chain". Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318). Each
token is drawn from the draft model's distribution under the row's own sampling settings, and
``Draft.probs`` holds exactly these probabilities. ``draft_tree`` and ``dynamic_tree`` are the same
drafter with other defaults. A draft model with another vocabulary: the key ``vocabulary``, Timor et
al. 2025 (2502.05202).
"""

from __future__ import annotations

from specjax import declare
from specjax.declare import key
from specjax.drafters.draft_models import _small_model, _vocabularies
from specjax.drafters.shared_keys import DraftKeys
from specjax.topology import shapes
from specjax.types import LM, Drafter

REFERENCE = ("leviathan2023fast", "chen2023accelerating", "timor2025heterogeneous")

GAMMA = 5


class Keys(DraftKeys):
    """The keys of ``draft_model``."""

    vocabulary: str = key(
        "same",
        '"same" (one tokenizer); or how a draft model with another one drafts: "tli" with the'
        ' tokens that both have, "slem" by the text of its most probable tokens (a chain), '
        '"slrs" from the probability of each token\'s text (a chain, small draft vocabularies)',
        choices=_vocabularies.CHOICES,
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with a small language model.

    Raises:
        UserError: gamma below 1 or without effect, another vocabulary than the target's (or none in
            common with it), a directory that cannot be loaded, a shape that does not fit.
    """
    if keys.vocabulary != _vocabularies.SAME:
        model, params = _small_model.read(keys.model, keys.params)
        return _vocabularies.make(target, model, params, keys.vocabulary, keys, GAMMA)
    # Decoders alone translate.
    loaded = _small_model.load(target, keys.model, keys.params, target.encoder is None)
    return _small_model.make("draft_model", target, keys, shapes.chain(GAMMA), loaded=loaded)
