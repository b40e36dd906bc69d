"""Loads a method by the name of its file, and checks the keys it is given."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from specjax.errors import UserError


def names(package: str) -> list[str]:
    """The public modules of a package."""
    path = importlib.import_module(package).__path__
    return sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))


def load(package: str, name: str, kind: str) -> Any:
    """The module ``package.name``, or a UserError that lists what there is."""
    if name not in names(package):
        raise UserError(f"unknown {kind} {name!r}; there is {', '.join(names(package))}")
    return importlib.import_module(f"{package}.{name}")


def call(package: str, name: str, kind: str, *args: Any, **keys: Any) -> Any:
    """``package.name.make(*args, **keys)`` after ``check``."""
    return check(package, name, kind, **keys)(*args, **keys)


def check(package: str, name: str, kind: str, **keys: Any) -> Any:
    """``package.name.make``, if it takes those keys and misses none; otherwise a UserError."""
    make = load(package, name, kind).make
    allowed = {k: p for k, p in inspect.signature(make).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for key in keys:
        if key not in allowed:
            takes = ", ".join(allowed) or "none"
            raise UserError(f"{kind} {name} does not take the key {key!r}; it takes {takes}")
    for key, parameter in allowed.items():
        if parameter.default is parameter.empty and key not in keys:
            raise UserError(f"{kind} {name} needs the key {key!r}")
    return make
