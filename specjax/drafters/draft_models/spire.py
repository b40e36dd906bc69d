"""SPIRe's draft model: some layers of the target with a cache of constant size, trained. L1.

Neelam et al. 2025 (2504.06419): static sparse attention, initialisation by layers of the target,
and feedback memory. A token attends to the first tokens of the text and to the newest ones; the
keys and values of earlier tokens come from a mixture of the outputs of all layers (Feedback
Transformer, Fan et al. 2020, 2002.09402). The cost of a draft token does not depend on the length
of the text. ``configs/spire.py`` trains it. Shapes of drafts and exactness are those of
``draft_model``.

With feedback memory the prompt is read one token after the other, so it costs as many draft steps
as it has tokens; without it (``feedback=False`` in training) it is read in parallel.
"""

from __future__ import annotations

import os
from typing import Any

from specjax import declare
from specjax.declare import key
from specjax.drafters.draft_models import _small_model
from specjax.drafters.objectives import Distilled
from specjax.drafters.shared_keys import DraftKeys
from specjax.topology import shapes
from specjax.types import LM, Drafter

REFERENCE = ("neelam2025spire", "fan2020addressing", "leviathan2023fast")

GAMMA = 5


class Keys(DraftKeys):
    """The keys of ``spire``."""

    model: LM | str | os.PathLike = key(
        help="the draft model: an ``LM`` of ``spire_model.from_config``, or a directory "
        "that ``configs/spire.py`` trained"
    )


class DraftModelKeys(declare.Keys, owner="config.drafter."):
    """config.drafter of objective distill: a new SPIRe draft model."""

    sinks: int = key(4, "first positions of a text, which every token attends to", least=0)
    window: int = key(64, "newest positions, the token's own included", least=1)
    feedback: bool = key(
        True,
        "keys and values of earlier tokens come from a mixture of all layers; False: a plain "
        "decoder",
    )
    own: bool = key(
        True, "with feedback: a token also attends to itself; False: to earlier tokens alone"
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with a SPIRe draft model.

    Raises:
        UserError: gamma below 1 or without effect, another vocabulary than the target's, something
            else than a SPIRe draft model, a shape that does not fit, drafts as long as its window.
    """
    own = _small_model.read(keys.model, keys.params, lambda model: _network().load(model))
    _small_model.check_vocabulary(target, own[0])
    return _small_model.make("spire", target, keys, shapes.chain(GAMMA), loaded=own)


def _network() -> Any:
    # Imported here: drafters made from an LM need no file formats.
    from specjax.drafters.draft_models import spire_model

    return spire_model


DISTILLED = Distilled(DraftModelKeys, network=_network)
