"""Loads a method by the name of its file, and checks the keys it is given."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
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


def keys(package: str, leave: frozenset[str] = frozenset()) -> dict[str, type]:
    """Every key that some method of the package takes, with the type in which a command line gives it."""
    found: dict[str, type] = {}
    for name in names(package):
        make = importlib.import_module(f"{package}.{name}").make
        for key, parameter in inspect.signature(make).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and key not in leave:
                words = re.findall(r"[\w.]+", str(parameter.annotation).partition("[")[0])
                kinds = {"int": int, "float": float, "bool": bool}
                kind = str if "str" in words else next((kinds[word] for word in words if word in kinds), str)
                if found.setdefault(key, kind) is not kind:
                    raise TypeError(f"{name} means another kind of thing by {key!r} than an earlier method does")
    return found


def check(package: str, name: str, kind: str, **keys: Any) -> Any:
    """``package.name.make``, if it takes those keys and misses none; otherwise a UserError."""
    module = load(package, name, kind)
    make = module.make
    allowed = {k: p for k, p in inspect.signature(make).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for key in keys:
        if key not in allowed:
            takes = ", ".join(allowed) or "none"
            raise UserError(f"{kind} {name} does not take the key {key!r}; it takes {takes}")
    for key, parameter in allowed.items():
        if parameter.default is parameter.empty and key not in keys:
            raise UserError(f"{kind} {name} needs the key {key!r}")
    if hasattr(module, "check"):  # a method that is made of others
        module.check(**keys)
    return make
