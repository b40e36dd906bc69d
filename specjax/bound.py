"""Functions with static arguments that are equal by value.

What is static in a program is compared when the program is called again. A ``functools.partial`` is
equal to itself only, so everything would be compiled again for the same method made twice.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np


class Bound(functools.partial):
    """``functools.partial``; two are equal if their functions and arguments are.

    Arguments are equal if they have one type and are equal, and so are the parts of tuples, lists
    and dicts: 1 is neither 1.0 nor True. Arrays of NumPy are compared by their contents. What
    cannot be hashed, such as an array of JAX, is equal to itself only. Do not change an argument.
    """

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not Bound or hash(self) != hash(other):
            return False
        return key(self) == key(other)

    def __hash__(self) -> int:
        known = self.__dict__.get("hash")
        if known is None:
            known = self.__dict__["hash"] = hash(key(self))
        return known

    def __repr__(self) -> str:
        given = [*map(_shown, self.args), *(f"{k}={_shown(v)}" for k, v in self.keywords.items())]
        return f"{getattr(self.func, '__qualname__', self.func)}({', '.join([*given, '...'])})"


def key(value: Any) -> Any:
    """A hashable value that is equal for equal values, as ``Bound`` compares them.

    A tuple with a method ``compared`` is compared by what this returns.
    """
    if type(value) is Bound:
        known = value.__dict__.get("key")
        if known is None:
            named = tuple(sorted((name, key(each)) for name, each in value.keywords.items()))
            known = (value.func, tuple(map(key, value.args)), named)
            value.__dict__["key"] = known
        return known
    if isinstance(value, tuple) and (compared := getattr(value, "compared", None)) is not None:
        value = compared()
    if isinstance(value, tuple | list):
        return (type(value), *map(key, value))
    if isinstance(value, dict):
        return (dict, *((name, key(each)) for name, each in value.items()))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        # As bytes, and without a copy where the array is contiguous: it may be a datastore.
        contents = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return (np.ndarray, value.shape, value.dtype, hashlib.sha256(contents.data).digest())
    try:
        hash(value)
    except TypeError:
        return (type(value), id(value))
    return (type(value), value)


def _shown(value: Any) -> str:
    """A short form of an argument."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    text = getattr(value, "name", None) if isinstance(value, tuple) else None
    text = text if isinstance(text, str) else getattr(value, "__qualname__", None) or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
