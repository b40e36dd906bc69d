"""The exceptions for mistakes of the caller. The command line prints their message as one line."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NoReturn


class UserError(ValueError):
    """A mistake of the caller; the message states in one line what is wrong and what is right."""


class TooLong(UserError):
    """The method has no chain of this length."""


class NonFiniteLogits(UserError):
    """A model produced NaN or infinite logits; the row stopped before a token was made of them."""


class OutOfMemory(UserError):
    """The memory of the device does not hold what was asked for."""


def one_line(error: BaseException) -> str:
    """The message of an error on one line; its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def on_disk(problem: str, advice: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns an OSError into a UserError of one line: the problem, its reason, and the advice.

    ``kinds`` are errors of libraries that mean the same, such as a full disk in safetensors. A
    UserError is not changed.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, *kinds) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{problem} ({reason}); {advice}") from error


def library(module: str, extra: str, problem: str) -> Any:
    """The module of a package that only the ``extra`` of specjax installs.

    Raises UserError without it: the problem, and the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{problem}: pip install 'specjax[{extra}]'") from None


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError with its usage; the programs print it as one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")
