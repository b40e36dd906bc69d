"""Finds a method by the name of its file, and checks the keys that it is given.

The methods of a package are its modules and those of the folders below it; modules and folders
that begin with "_", and those in the package's ``HELPERS``, are helpers. The first folder is the
family of a method. A name is unique across families. A module has a function ``make``, whose keys
``specjax.declare`` declares.

A name with a colon is an object outside the package: ``my_module:make`` (``imported``).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any, TypeGuard

from specjax import declare
from specjax.errors import UserError


@functools.cache
def modules(package: str) -> dict[str, str]:
    """Method name -> dotted name of its module. Raises TypeError for a name that occurs twice."""
    helpers = getattr(importlib.import_module(package), "HELPERS", ())
    found: dict[str, str] = {}
    folders = [package]
    for folder in folders:  # the folders in it follow
        for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
            dotted = f"{folder}.{module.name}"
            if module.name.startswith("_") or module.name in helpers:
                continue
            if module.ispkg:
                folders.append(dotted)
            elif module.name in found:
                raise TypeError(f"{found[module.name]} and {dotted} have the same name")
            else:
                found[module.name] = dotted
    return dict(sorted(found.items()))


def names(package: str) -> list[str]:
    """The methods of a package, in alphabetical order."""
    return list(modules(package))


def family(package: str, name: str) -> str:
    """The first folder of a method's path inside its package, "" if it is in no folder."""
    return _path(package, name).partition("/")[0] if "/" in _path(package, name) else ""


def file(package: str, name: str) -> str:
    """The file of a method, which is not imported for this."""
    return f"{sys.modules[package].__path__[0]}/{_path(package, name)}.py"


def _path(package: str, name: str) -> str:
    return modules(package)[name].removeprefix(f"{package}.").replace(".", "/")


def nearest(name: str, known: Iterable[str]) -> str:
    """The part of a message that proposes the known names most similar to ``name``; "" if none."""
    close = difflib.get_close_matches(name, dict.fromkeys(known), 3, 0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def is_import(name: Any) -> TypeGuard[str]:
    """Whether a method's name is that of an object outside the package: "my_module:make"."""
    return isinstance(name, str) and ":" in name


@functools.cache
def imported(spec: str) -> Any:
    """The object that ``spec`` names: "module:attribute", importable from the working directory.

    Raises UserError: a name of another form, a module that cannot be imported, or a missing
    attribute.
    """
    module_name, _, attribute = spec.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise UserError(f"{spec!r} is no object's name; give module:attribute, as my_module:make")
    # A console command does not put the working directory on the path; ``python -m`` does.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    # A module that was written after the last import must be found.
    importlib.invalidate_caches()
    try:
        value = importlib.import_module(module_name)
    except Exception as error:  # the user's program
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise UserError(
                f"{spec}: there is no module {missing} in the working directory or on Python's "
                "path; give module:attribute, as my_module:make"
            ) from None
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{spec}: importing {module_name} failed: {reason}") from None
    for part in attribute.split("."):
        if not hasattr(value, part):
            own = [name for name in vars(value) if not name.startswith("_")]
            raise UserError(f"{spec}: {module_name} has no {attribute}{nearest(attribute, own)}")
        value = getattr(value, part)
    return value


def sources(names: Iterable[str]) -> list[str]:
    """The files of the modules that the names "module:attribute" import; other names have none."""
    own = {sys.modules.get(name.partition(":")[0]) for name in names if is_import(name)}
    return sorted(file for module in own if (file := getattr(module, "__file__", None)))


def _imported_method(spec: str, kind: str) -> Any:
    """An object outside the package in the form of a module of a method.

    A function is the method's ``make``. Any other object is what such a function would return.
    Raises UserError.
    """
    value = imported(spec)
    module = sys.modules[spec.partition(":")[0]]
    make = value if callable(value) else lambda *_: value
    try:
        inspect.signature(make)
    except (TypeError, ValueError):
        problem = f"{kind} {spec} is {value!r}; it must be a function, or its result"
        raise UserError(problem) from None
    return SimpleNamespace(__doc__=module.__doc__, __name__=module.__name__, make=make)


def load(package: str, name: str, kind: str) -> Any:
    """The module of the method ``name``, or what has a module's ``make`` for "my_module:make".

    Raises UserError that lists the methods.
    """
    if is_import(name):
        return _imported_method(name, kind)
    if name not in modules(package):
        raise UserError(f"unknown {kind} {name!r}; it must be one of {', '.join(names(package))}")
    return importlib.import_module(modules(package)[name])


def keys_of(module: ModuleType) -> dict[str, declare.Key]:
    """The keys of a method's ``make``: its own, then those that it shares."""
    return declare.of(module.make)


def keys(package: str) -> dict[str, type]:
    """All keys of the package's methods, with the type in which a command line gives them.

    Keys for Python alone are left out. Raises TypeError if two methods give a key different types.
    """
    types: dict[str, type] = {}
    for name, dotted in modules(package).items():
        for key in keys_of(importlib.import_module(dotted)).values():
            if not key.facts.python and types.setdefault(key.name, key.type) is not key.type:
                raise TypeError(
                    f"{name}: the key {key.name!r} has another type than in an earlier method"
                )
    return types


def call(package: str, name: str, kind: str, wanted: type, *args: Any, **keys: Any) -> Any:
    """The method's ``make(*args, **keys)`` after ``check``.

    Raises UserError if the method is outside the package and makes no ``wanted``.
    """
    make = check(package, name, kind, **keys)
    if not is_import(name):
        return make(*args, **keys)
    try:
        inspect.signature(make).bind(*args, **keys)
    except TypeError as error:
        form = "make(target, *, key=...)" if args else "make(*, key=...)"
        raise UserError(f"{kind} {name} cannot be made: {error}; its form is {form}") from None
    try:
        value = make(*args, **keys)
    except UserError:
        raise
    except Exception as error:  # the user's program
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{kind} {name} cannot be made: {type(error).__name__}: {error} "
            f"({os.path.basename(place.filename)}, line {place.lineno})"
        ) from error
    if not isinstance(value, wanted):
        raise UserError(
            f"{kind} {name} gives {value!r:.60}; it must give a specjax.{wanted.__name__}"
        )
    return value


def check(package: str, name: str, kind: str, **keys: Any) -> Any:
    """The method's ``make``, if it takes these keys and none is missing. Raises UserError."""
    module = load(package, name, kind)
    allowed, declared = keys_of(module), getattr(module.make, "keys", None)
    for key in keys:
        if key not in allowed:
            takes = f"it takes {', '.join(allowed) or 'none'}"
            if key == "gamma" and (length := getattr(declared, "LENGTH", "")):
                takes = f"its key for the length of drafts is {length!r}"
            raise UserError(f"{kind} {name} does not take the key {key!r}; {takes}")
    for key in allowed.values():
        if key.required and key.name not in keys:
            raise UserError(f"{kind} {name} needs the key {key.name!r}")
    if declared is not None:
        declared(**keys)  # checks types and ranges
    return module.make
