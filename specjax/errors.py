"""The one exception that means "you asked for something that cannot be": the command line turns it into one line."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the caller, told in one line: what is wrong, and what would be right."""


class NonFiniteLogits(UserError):
    """A model produced NaN or infinite logits; the row stopped there and no token was made of them."""
