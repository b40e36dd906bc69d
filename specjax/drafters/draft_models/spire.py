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

from specjax.checks import whole
from specjax.drafters import _growth
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import TreeKeys
from specjax.drafters.draft_models import _small_model
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import LM, Drafter, Params

REFERENCE = ("neelam2025spire", "fan2020addressing", "leviathan2023fast")

SHARED = TreeKeys
GAMMA = 5


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    gamma: int | None = None,
    gaps: bool = False,
    params: Params = None,
    **shared: Any,
) -> Drafter:
    """Drafts with a SPIRe draft model.

    Args:
        target: the model to be accelerated.
        model: the draft model: an ``LM`` of ``models.spire.model.from_config``, or a directory that
            ``configs/spire.py`` trained.
        gamma: draft tokens per round of a chain; None: 5.
        gaps: whether other drafters may propose in some rounds; ``escalate`` sets it.
        params: the draft model's parameters when ``model`` is an ``LM``.
        shared: the keys of ``TreeKeys``; the default is a chain, drawn from the model's
            probabilities ("iid").

    Raises:
        UserError: gamma below 1 or without effect, another vocabulary than the target's, something
            else than a SPIRe draft model, a shape that does not fit, drafts as long as its window.
    """
    keys = TreeKeys(**shared)
    if gamma is not None and keys.tree:
        raise UserError(f"gamma is {gamma} and the tree is given too; give one of them")
    gamma = GAMMA if gamma is None else whole("gamma", gamma, 1)
    if not isinstance(model, LM):
        # Imported here: drafters made from an LM need no file formats.
        from specjax.models.spire import directory

        _small_model.check_source(model, params)
        loaded = directory.load(model)
        model, params = loaded.lm, loaded.params
    _small_model.check_vocabulary(target, model)
    method = Method("spire", shapes.chain(gamma), "iid", target.vocab_size)
    plan = _growth.read(method, keys)
    training = _small_model.training_of(target, model, plan)
    return _small_model.build("spire", model, params, plan, gaps=gaps, training=training)
