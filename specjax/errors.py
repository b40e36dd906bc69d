"""The exceptions for mistakes of the caller. The command line prints their message as one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class UserError(ValueError):
    """A mistake of the caller; the message states in one line what is wrong and what is right."""


class TooLong(UserError):
    """The method has no chain of this length."""


class NonFiniteLogits(UserError):
    """A model produced NaN or infinite logits; the row stopped before a token was made of them."""


class OutOfMemory(UserError):
    """The memory of the device does not hold what was asked for."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError with its usage; the programs print it as one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")
