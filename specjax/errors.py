"""The exceptions for mistakes of the caller. The command line prints their message as one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

import jax


class UserError(ValueError):
    """A mistake of the caller; the message states in one line what is wrong and what is right."""


class TooLong(UserError):
    """The method has no chain of this length."""


class NonFiniteLogits(UserError):
    """A model produced NaN or infinite logits; the row stopped before a token was made of them."""


# Without leaves, so it can be part of a pytree. The dataclass has a hash, unlike Mapping.
@jax.tree_util.register_static  # pyright: ignore[reportArgumentType]
@dataclasses.dataclass(frozen=True)
class Unreadable(Mapping):
    """Takes the place of weights or a cache that a drafter must not read.

    Every access raises UserError with the message.
    """

    message: str

    def _refuse(self, *_: Any) -> NoReturn:
        raise UserError(self.message)

    __getitem__ = __iter__ = __len__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        # Python and JAX ask for names with underscores.
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()
