"""Decoders, and models that read their prompt with an encoder: a pair has one kind."""

from __future__ import annotations

from specjax.errors import UserError
from specjax.types import LM


def check(target: LM, draft: LM) -> None:
    """Raises UserError for a decoder that drafts for an encoder-decoder model, and the reverse."""
    ours, theirs = target.encoder, draft.encoder
    kinds = [
        "continues its prompt" if own is None else "reads its prompt with an encoder"
        for own in (ours, theirs)
    ]
    if kinds[0] != kinds[1]:
        raise UserError(
            f"the target {kinds[0]} and the draft model {kinds[1]}; "
            f"take {'a decoder' if ours is None else 'an encoder-decoder model'} as the draft model"
        )
    if ours is not None and theirs is not None and ours.start != theirs.start:
        raise UserError(
            f"the decoder of the draft model begins with token {theirs.start} and that of the "
            f"target with {ours.start}; they must begin with the same one"
        )
