"""BiLD: a small model decodes greedily while it is sure, and the target corrects it. L3.

Kim et al. 2023 (2302.07863). A draft ends where the small model's highest probability is below a
threshold (*fallback*), or after ``gamma`` tokens. The target then reads it in one pass; the rule
"rollback" keeps the tokens whose loss under the target is small. With its threshold 0, or with the
rules "chain" and "deterministic", the text is exactly that of the target: greedy speculative
decoding with a length that follows the small model's confidence (L1). It is ``draft_model`` with
other defaults.
"""

from __future__ import annotations

import os

from specjax.checks import number, whole
from specjax.drafters.draft_models import draft_model
from specjax.types import LM, Drafter, Params

REFERENCE = "kim2023speculative"


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    fallback: float = 0.6,
    gamma: int = 10,
    gaps: bool = False,
    params: Params = None,
) -> Drafter:
    """Drafts greedily with a small model, as long as it is sure.

    Args:
        target: the model to be accelerated.
        model: the small model: an ``LM``, or any model that ``hf.load`` takes.
        fallback: in [0, 1], the draft ends before a token if the model's highest probability there
            is lower.
        gamma: the most tokens of a draft.
        gaps: whether other drafters may propose in some rounds; ``escalate`` sets it.
        params: the small model's parameters when ``model`` is an ``LM``.

    Raises:
        UserError: numbers out of range, another vocabulary than the target's, a directory that
            cannot be loaded.
    """
    number("fallback", fallback, "in [0, 1]", lambda x: 0 <= x <= 1)
    whole("gamma", gamma, 1)
    made = draft_model.make(
        target,
        model=model,
        gamma=gamma,
        gaps=gaps,
        params=params,
        siblings="top_k",
        control=f"threshold:{fallback!r}",
    )
    return made._replace(name="bild", probs=None, training=None)
