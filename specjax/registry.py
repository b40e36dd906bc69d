"""Finds a method by the name of its file, and checks the keys that it is given.

The methods of a package are its modules and those of its subfolders (families); modules that begin
with "_", and those in the package's ``HELPERS``, are helpers. A name is unique across families. A
module has a function ``make``: its keyword-only parameters are the keys of the method. Keys that
several methods share are declared once, as a dataclass that a module names ``SHARED``; ``make``
then takes them as ``**shared``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from types import ModuleType
from typing import Any, NamedTuple

from specjax.errors import UserError


class Key(NamedTuple):
    """A key of a method."""

    annotation: str
    required: bool


@functools.cache
def _modules(package: str) -> dict[str, str]:
    """Method name -> dotted name of its module. Raises TypeError for a name that occurs twice."""
    modules: dict[str, str] = {}
    helpers = getattr(importlib.import_module(package), "HELPERS", ())
    for folder in (package, *_families(package)):
        for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
            if module.ispkg or module.name.startswith("_") or module.name in helpers:
                continue
            dotted = f"{folder}.{module.name}"
            if module.name in modules:
                raise TypeError(f"{modules[module.name]} and {dotted} have the same name")
            modules[module.name] = dotted
    return dict(sorted(modules.items()))


def _families(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    return [
        f"{package}.{module.name}"
        for module in pkgutil.iter_modules(path)
        if module.ispkg and not module.name.startswith("_")
    ]


def names(package: str) -> list[str]:
    """The methods of a package, in alphabetical order."""
    return list(_modules(package))


def load(package: str, name: str, kind: str) -> ModuleType:
    """The module of the method ``name``. Raises UserError that lists the methods."""
    if name not in _modules(package):
        raise UserError(f"unknown {kind} {name!r}; it must be one of {', '.join(names(package))}")
    return importlib.import_module(_modules(package)[name])


def keys_of(module: ModuleType) -> dict[str, Key]:
    """The keys of a method's ``make``: its own, then the shared ones."""
    result = {
        name: Key(str(parameter.annotation), parameter.default is parameter.empty)
        for name, parameter in inspect.signature(module.make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    if hasattr(module, "SHARED"):
        for field in dataclasses.fields(module.SHARED):
            result[field.name] = Key(str(field.type), False)
    return result


def keys(package: str, leave: frozenset[str] = frozenset()) -> dict[str, type]:
    """All keys of the package's methods, with the type in which a command line gives them.

    The keys in ``leave`` are left out. Raises TypeError if two methods give a key different types.
    """
    types: dict[str, type] = {}
    for name, dotted in _modules(package).items():
        for key, (annotation, _) in keys_of(importlib.import_module(dotted)).items():
            if key in leave:
                continue
            kind = _type_of(annotation)
            if types.setdefault(key, kind) is not kind:
                raise TypeError(
                    f"{name}: the key {key!r} has another type than in an earlier method"
                )
    return types


def _type_of(annotation: str) -> type:
    """int, float or bool if the annotation names it and not str; otherwise str."""
    words = re.findall(r"[\w.]+", annotation.partition("[")[0])
    types = {"int": int, "float": float, "bool": bool}
    return str if "str" in words else next((types[w] for w in words if w in types), str)


def call(package: str, name: str, kind: str, *args: Any, **keys: Any) -> Any:
    """The method's ``make(*args, **keys)`` after ``check``."""
    return check(package, name, kind, **keys)(*args, **keys)


def check(package: str, name: str, kind: str, **keys: Any) -> Any:
    """The method's ``make``, if it takes these keys and none is missing. Raises UserError."""
    module = load(package, name, kind)
    allowed = keys_of(module)
    for key in keys:
        if key not in allowed:
            takes = ", ".join(allowed) or "none"
            raise UserError(f"{kind} {name} does not take the key {key!r}; it takes {takes}")
    for key, (_, required) in allowed.items():
        if required and key not in keys:
            raise UserError(f"{kind} {name} needs the key {key!r}")
    # A method that combines other methods checks their keys too.
    if hasattr(module, "check"):
        module.check(**keys)
    return module.make
