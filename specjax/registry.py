"""Finds a method by the name of its file, and checks the keys that it is given.

The methods of a package are its modules and those of its subfolders (families); modules that begin
with "_", and those in the package's ``HELPERS``, are helpers. A name is unique across families. A
module has a function ``make``: its keyword-only parameters are the keys of the method. Keys that
several methods share are declared once, as a dataclass that a module names ``SHARED``; ``make``
then takes them as ``**shared``.

A name with a colon is an object outside the package: ``my_module:make`` (``imported``).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from specjax.errors import UserError

_NONE = inspect.Parameter.empty


class Key(NamedTuple):
    """A key of a method."""

    annotation: str
    required: bool
    default: Any = None


@functools.cache
def modules(package: str) -> dict[str, str]:
    """Method name -> dotted name of its module. Raises TypeError for a name that occurs twice."""
    found: dict[str, str] = {}
    helpers = getattr(importlib.import_module(package), "HELPERS", ())
    for folder in (package, *_families(package)):
        for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
            if module.ispkg or module.name.startswith("_") or module.name in helpers:
                continue
            dotted = f"{folder}.{module.name}"
            if module.name in found:
                raise TypeError(f"{found[module.name]} and {dotted} have the same name")
            found[module.name] = dotted
    return dict(sorted(found.items()))


def _families(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    return [
        f"{package}.{module.name}"
        for module in pkgutil.iter_modules(path)
        if module.ispkg and not module.name.startswith("_")
    ]


def names(package: str) -> list[str]:
    """The methods of a package, in alphabetical order."""
    return list(modules(package))


def family(package: str, name: str) -> str:
    """The folder of a method inside its package, "" if it is in no folder."""
    return _path(package, name).rpartition("/")[0]


def file(package: str, name: str) -> str:
    """The file of a method, which is not imported for this."""
    return f"{sys.modules[package].__path__[0]}/{_path(package, name)}.py"


def _path(package: str, name: str) -> str:
    return modules(package)[name].removeprefix(f"{package}.").replace(".", "/")


def nearest(name: str, known: Iterable[str]) -> str:
    """The part of a message that proposes the known names most similar to ``name``; "" if none."""
    close = difflib.get_close_matches(name, dict.fromkeys(known), 3, 0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def is_import(name: Any) -> bool:
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
        raise UserError(
            f"{spec}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from None
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

    A function is the method's ``make``; ``SHARED`` and ``check`` of its module belong to it. Any
    other object is what such a function would return. Raises UserError.
    """
    value = imported(spec)
    module = sys.modules[spec.partition(":")[0]]
    result = SimpleNamespace(__doc__=module.__doc__, __name__=module.__name__)
    if not callable(value):
        result.make = lambda *_: value
        return result
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        raise UserError(f"{kind} {spec} is {value!r}; it must be a function, or its result") from (
            None
        )
    result.make = value
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and hasattr(module, "SHARED"):
        result.SHARED = module.SHARED
    if spec.endswith(":make") and hasattr(module, "check"):
        result.check = module.check
    return result


def load(package: str, name: str, kind: str) -> Any:
    """The module of the method ``name``, or what has a module's ``make`` for "my_module:make".

    Raises UserError that lists the methods.
    """
    if is_import(name):
        return _imported_method(name, kind)
    if name not in modules(package):
        raise UserError(f"unknown {kind} {name!r}; it must be one of {', '.join(names(package))}")
    return importlib.import_module(modules(package)[name])


def keys_of(module: ModuleType) -> dict[str, Key]:
    """The keys of a method's ``make``: its own, then the shared ones."""
    result = {
        name: _key(parameter)
        for name, parameter in inspect.signature(module.make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
        # Keys without the star, in functions outside the package.
        or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is not _NONE)
    }
    if hasattr(module, "SHARED"):
        for field in dataclasses.fields(module.SHARED):
            result[field.name] = Key(str(field.type), False, field.default)
    return result


def _key(parameter: inspect.Parameter) -> Key:
    required, annotation = parameter.default is _NONE, parameter.annotation
    if annotation is _NONE:  # a function without annotations
        annotation = str if required or parameter.default is None else type(parameter.default)
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return Key(text, required, None if required else parameter.default)


def keys(package: str, leave: frozenset[str] = frozenset()) -> dict[str, type]:
    """All keys of the package's methods, with the type in which a command line gives them.

    The keys in ``leave`` are left out. Raises TypeError if two methods give a key different types.
    """
    types: dict[str, type] = {}
    for name, dotted in modules(package).items():
        for key, (annotation, *_) in keys_of(importlib.import_module(dotted)).items():
            if key in leave:
                continue
            kind = type_of(annotation)
            if types.setdefault(key, kind) is not kind:
                raise TypeError(
                    f"{name}: the key {key!r} has another type than in an earlier method"
                )
    return types


def type_of(annotation: str) -> type:
    """int, float or bool if the annotation names it and not str; otherwise str."""
    words = re.findall(r"[\w.]+", annotation.partition("[")[0])
    types = {"int": int, "float": float, "bool": bool}
    return str if "str" in words else next((types[w] for w in words if w in types), str)


def call(package: str, name: str, kind: str, *args: Any, **keys: Any) -> Any:
    """The method's ``make(*args, **keys)`` after ``check``."""
    make = check(package, name, kind, **keys)
    if is_import(name):
        try:
            inspect.signature(make).bind(*args, **keys)
        except TypeError as error:
            form = "make(target, *, key=...)" if args else "make(*, key=...)"
            raise UserError(f"{kind} {name} cannot be made: {error}; its form is {form}") from None
        try:
            return make(*args, **keys)
        except UserError:
            raise
        except Exception as error:  # the user's program
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"{kind} {name} cannot be made: {type(error).__name__}: {error} "
                f"({os.path.basename(place.filename)}, line {place.lineno})"
            ) from error
    return make(*args, **keys)


def check_type(name: str, kind: str, value: Any, wanted: type) -> Any:
    """``value``, which the method ``name`` made.

    Raises UserError if the method is outside the package and this is no ``wanted``.
    """
    if is_import(name) and not isinstance(value, wanted):
        raise UserError(
            f"{kind} {name} gives {value!r:.60}; it must give a specjax.{wanted.__name__}"
        )
    return value


def check(package: str, name: str, kind: str, **keys: Any) -> Any:
    """The method's ``make``, if it takes these keys and none is missing. Raises UserError."""
    module = load(package, name, kind)
    allowed = keys_of(module)
    for key in keys:
        if key not in allowed:
            takes = ", ".join(allowed) or "none"
            raise UserError(f"{kind} {name} does not take the key {key!r}; it takes {takes}")
    for key, (_, required, _) in allowed.items():
        if required and key not in keys:
            raise UserError(f"{kind} {name} needs the key {key!r}")
    # A method that combines other methods checks their keys too.
    if hasattr(module, "check"):
        module.check(**keys)
    return module.make
