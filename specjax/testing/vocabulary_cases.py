"""Cases of a draft model with another vocabulary than the target's.

Two tokens are shared, under other ids; one token of the target is written as two of the draft's,
and with "slrs" as one too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specjax import drafters
from specjax.models.token_bytes import of_tokens
from specjax.types import LM, Drafter

_KEYS: dict[str, dict[str, Any]] = {
    "tli": {"vocabulary": "tli", "gamma": 2},
    "tli tree": {"vocabulary": "tli", "tree": "2x1", "siblings": "without_replacement"},
    "slem": {"vocabulary": "slem", "gamma": 2},
    "slrs": {"vocabulary": "slrs", "gamma": 2},
}


def tokens(vocab: int) -> tuple[bytes, ...]:
    """The target's tokens: a, b, ab, then further letters."""
    return (b"a", b"b", b"ab", *(bytes([99 + i]) for i in range(vocab - 3)))


def draft_tokens(vocab: int, last: bytes = b"?") -> tuple[bytes, ...]:
    """The draft model's: b, a, one of its own or ``last``, then letters in another order."""
    return (b"b", b"a", last, *reversed(tokens(vocab)[3:]))


def spelled(model: LM, texts: tuple[bytes, ...]) -> LM:
    """The model with a vocabulary of these texts."""
    return model._replace(token_bytes=of_tokens(repr(texts), texts))


def _make(keys: dict[str, Any]) -> Callable[[LM, LM, LM], Drafter]:
    def made(target: LM, draft: LM, other: LM) -> Drafter:
        del other
        last = b"ab" if keys["vocabulary"] == "slrs" else b"?"
        return drafters.make(
            "draft_model",
            spelled(target, tokens(target.vocab_size)),
            model=spelled(draft, draft_tokens(draft.vocab_size, last)),
            **keys,
        )

    return made


# As ``cases._MODELS``: from the target and two draft models.
MODELS = {name: _make(keys) for name, keys in _KEYS.items()}
