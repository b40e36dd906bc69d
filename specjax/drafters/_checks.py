"""Checks of the keys that drafters share, each one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from specjax.errors import UserError
from specjax.types import LM


def at_least(name: str, value: int, least: int) -> None:
    """Raises UserError unless ``value`` is a whole number >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UserError(f"{name} is {value}; it must be a whole number >= {least}")


def counts(**values: int) -> None:
    """Raises UserError unless every value is a whole number >= 1."""
    for name, value in values.items():
        at_least(name, value, 1)


def ngrams(longest: int, shortest: int) -> None:
    """Raises UserError unless both lengths are whole numbers >= 1, the longest not below the shortest."""
    counts(max_ngram=longest, min_ngram=shortest)
    if longest < shortest:
        raise UserError(f"max_ngram is {longest} and min_ngram {shortest}; the longest n-gram must be at least as long")


def number(name: str, value: float, right: str, ok: Callable[[float], bool]) -> None:
    """Raises UserError unless ``value`` is a number for which ``ok`` holds; ``right`` says what that is."""
    real = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not ok(value):
        raise UserError(f"{name} is {value!r}; it must be a number {right}")


def yes_or_no(name: str, value: bool) -> None:
    """Raises UserError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}; it must be True or False")


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises UserError unless ``value`` is one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise UserError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def same_vocabulary(target: LM, draft: LM) -> None:
    """Raises UserError unless both models count the same tokens."""
    if target.vocab_size != draft.vocab_size:
        raise UserError(
            f"the draft model has a vocabulary of {draft.vocab_size} and the target of {target.vocab_size}; "
            "they must share one tokenizer"
        )
    if target.vocabulary and draft.vocabulary and target.vocabulary != draft.vocabulary:
        raise UserError(
            f"draft model and target have {target.vocab_size} tokens each, but not the same ones; "
            "they must share one tokenizer"
        )


def positions(draft: LM, slots: int, nodes: int) -> None:
    """Raises UserError if a text of ``slots - nodes`` tokens does not fit the draft model."""
    if draft.max_positions is not None and slots - nodes > draft.max_positions:
        raise UserError(
            f"prompt and new tokens need {slots - nodes} positions, and the draft model has {draft.max_positions}; "
            "shorten them or take another draft model"
        )
