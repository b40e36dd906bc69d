"""What a target and a draft model must have in common: their kind and their vocabulary.

The kinds are decoders, and models that read their prompt with an encoder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specjax.bound import Bound
from specjax.errors import UserError
from specjax.types import LM, Array, Output


def check(target: LM, draft: LM) -> None:
    """Raises UserError for a decoder that drafts for an encoder-decoder model, and the reverse."""
    ours, theirs = target.encoder, draft.encoder
    kinds = {True: "continues its prompt", False: "reads its prompt with an encoder"}
    if (ours is None) != (theirs is None):
        raise UserError(
            f"the target {kinds[ours is None]} and the draft model {kinds[theirs is None]}; "
            f"take {'a decoder' if ours is None else 'an encoder-decoder model'} as the draft model"
        )
    if ours is not None and theirs is not None and ours.start != theirs.start:
        raise UserError(
            f"the decoder of the draft model begins with token {theirs.start} and that of the "
            f"target with {ours.start}; they must begin with the same one"
        )


def check_vocabulary(target: LM, draft: LM, translates: bool = False) -> None:
    """Raises UserError unless both models have the same tokens and are of the same kind.

    ``translates``: the drafter has the key ``vocabulary``, which the message then names.
    With one tokenizer the sizes may differ: models of one family pad their embeddings differently.
    """
    check(target, draft)
    known = target.vocabulary and draft.vocabulary
    if known and target.vocabulary != draft.vocabulary:
        raise UserError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens and the target of "
            f"{target.vocab_size}, and they are not the same ones; they must share one tokenizer"
            + (', or take vocabulary="tli", which translates' if translates else "")
        )
    if not known and target.vocab_size != draft.vocab_size:
        raise UserError(
            f"the draft model has a vocabulary of {draft.vocab_size} and the target of "
            f"{target.vocab_size}, and not both have a tokenizer that shows that the rest is "
            "padding; they must share one tokenizer"
        )


@functools.cache
def in_size(model: LM, size: int) -> LM:
    """The model with logits f[B,T,size]: cut, or padded with tokens of probability 0.

    An equal size gives the model itself, and equal arguments the same functions.
    """
    if model.vocab_size == size:
        return model
    return with_logits(model, size, Bound(_sized, size))


def _sized(size: int, logits: Array) -> Array:
    ends = [(0, 0)] * (logits.ndim - 1) + [(0, max(size - logits.shape[-1], 0))]
    return jnp.pad(logits[..., :size], ends, constant_values=-jnp.inf)


def with_logits(model: LM, size: int, fit: Callable[[Array], Array]) -> LM:
    """The model with the logits ``fit(logits)`` f[...,size]; it has no parts."""

    tapping, unembed = model.tapping, model.unembed
    return model._replace(
        vocab_size=size,
        apply=Bound(_applied, fit, model.apply),
        unembed=unembed and Bound(_unembedded, fit, unembed),
        tapping=tapping and Bound(_tapping, fit, tapping),
        inside=model.inside._replace(part=None),
    )


def _applied(fit: Callable, apply: Callable, *args: Any) -> tuple[Output, Any]:
    out, block = apply(*args)
    return out._replace(logits=fit(out.logits)), block


def _unembedded(fit: Callable, unembed: Callable, params: Any, hidden: Array) -> Array:
    return fit(unembed(params, hidden))


def _tapping(fit: Callable, tapping: Callable, layers: tuple[int, ...]) -> Callable:
    return Bound(_applied, fit, tapping(layers))
