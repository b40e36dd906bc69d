"""BiLD: a small model decodes greedily while it is sure, and the target corrects it. L3.

Kim et al. 2023 (2302.07863). A draft ends where the small model's highest probability is below a
threshold (*fallback*), or after ``gamma`` tokens. The target then reads it in one pass; the rule
"rollback" keeps the tokens whose loss under the target is small. With its threshold 0, or with the
rules "chain" and "deterministic", the text is exactly that of the target: greedy speculative
decoding with a length that follows the small model's confidence (L1). It is ``draft_model`` with
other defaults.
"""

from __future__ import annotations

from specjax import declare
from specjax.declare import key
from specjax.drafters.draft_models import draft_model
from specjax.drafters.shared_keys import ModelKeys
from specjax.types import LM, Drafter

REFERENCE = "kim2023speculative"


class Keys(ModelKeys):
    """The keys of ``bild``."""

    fallback: float = key(
        0.6,
        "in [0, 1], the draft ends before a token if the model's highest probability there is "
        "lower",
        least=0,
        most=1,
    )
    gamma: int = key(10, "the most tokens of a draft", least=1)


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts greedily with a small model, as long as it is sure.

    Raises:
        UserError: numbers out of range, another vocabulary than the target's, a directory that
            cannot be loaded.
    """
    own = dict(vars(keys))
    control = f"threshold:{own.pop('fallback')!r}"
    made = draft_model.make(target, **own, siblings="top_k", control=control)
    return made._replace(name="bild", probs=None, training=None)
