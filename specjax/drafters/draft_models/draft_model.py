"""A smaller language model drafts: a chain, or a tree of any shape, from its own cache.

L1 with the rule "chain". Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318). Each
token is drawn from the draft model's distribution under the row's own sampling settings, and
``Draft.probs`` holds exactly these probabilities. ``draft_tree`` and ``dynamic_tree`` are the same
drafter with other defaults. A draft model with another vocabulary: the key ``vocabulary``, Timor et
al. 2025 (2502.05202).
"""

from __future__ import annotations

import os
from typing import Any

from specjax.checks import one_of, whole
from specjax.drafters import _growth
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import TreeKeys
from specjax.drafters.draft_models import _small_model, _vocabularies
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import LM, Drafter, Params

REFERENCE = ("leviathan2023fast", "chen2023accelerating", "timor2025heterogeneous")

SHARED = TreeKeys
GAMMA = 5


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    gamma: int | None = None,
    vocabulary: str = "same",
    gaps: bool = False,
    params: Params = None,
    **shared: Any,
) -> Drafter:
    """Drafts with a small language model.

    Args:
        target: the model to be accelerated.
        model: the draft model: an ``LM``, or any model that ``hf.load`` takes.
        gamma: draft tokens per round of a chain; None: 5.
        vocabulary: "same" (one tokenizer); or how a draft model with another one drafts: "tli" with
            the tokens that both have, "slem" by the text of its most probable tokens (a chain),
            "slrs" from the probability of each token's text (a chain, small draft vocabularies).
        gaps: whether other drafters may propose in some rounds; ``escalate`` sets it.
        params: the draft model's parameters when ``model`` is an ``LM``; ``init_params`` returns
            them.
        shared: the keys of ``TreeKeys``; the default is a chain, drawn from the model's
            probabilities ("iid").

    Raises:
        UserError: gamma below 1 or without effect, another vocabulary than the target's (or none in
            common with it), a directory that cannot be loaded, a shape that does not fit.
    """
    keys = TreeKeys(**shared)
    if gamma is not None and keys.tree:
        raise UserError(f"gamma is {gamma} and the tree is given too; give one of them")
    gamma = GAMMA if gamma is None else whole("gamma", gamma, 1)
    one_of("vocabulary", vocabulary, _vocabularies.CHOICES)
    if vocabulary != _vocabularies.SAME:
        model, params = _small_model.read(model, params)
        return _vocabularies.make(target, model, params, vocabulary, gamma, keys, gaps)
    # Decoders alone translate.
    model, params = _small_model.load(target, model, params, translates=target.encoder is None)
    method = Method("draft_model", shapes.chain(gamma), "iid", target.vocab_size)
    plan = _growth.read(method, keys)
    training = _small_model.training_of(target, model, plan)
    return _small_model.build("draft_model", model, params, plan, gaps=gaps, training=training)
