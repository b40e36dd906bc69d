"""The pages of the reference: every public module, made by autodoc."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

from source_text import field_comments, literal_blocks

import specjax

# Page -> its title; every other part of the package has a page of its name.
ENGINE = (
    *(
        "types",
        "rng",
        "logit_maps",
        "sampling",
        "tree",
        "cache",
        "step",
        "outcome",
        "prompt",
        "decode",
    ),
    *("errors", "checks", "config", "files", "registry", "references"),
)


@functools.cache
def modules() -> tuple[str, ...]:
    """Every public module: no part of its name begins with "_"."""
    walk = pkgutil.walk_packages(specjax.__path__, "specjax.")
    found = [module.name for module in walk if not re.search(r"\._", module.name)]
    return ("specjax", *found)


def page_of(module: str) -> str:
    """The page of a module."""
    part = module.split(".")[1] if "." in module else "specjax"
    return "engine" if part in ENGINE else part


def pages() -> dict[str, str]:
    """Name of a page -> its RST text."""
    pages: dict[str, list[str]] = {}
    for module in sorted(modules(), key=_order):
        pages.setdefault(page_of(module), []).append(module)
    return {name: page(name, names) for name, names in pages.items()}


def contents() -> str:
    """The table of contents of the reference, as MyST: the engine first, then the packages."""
    first = ("specjax", "engine", "accept", "control", "drafters", "topology", "models", "data")
    names = pages()
    order = [name for name in first if name in names]
    order += [name for name in names if name not in first]
    lines = "\n".join(f"api/{name}" for name in order)
    return f"```{{toctree}}\n:maxdepth: 1\n\n{lines}\n```"


def _order(module: str) -> tuple:
    part = module.split(".")[1] if "." in module else ""
    return (ENGINE.index(part) if part in ENGINE else -1, module)


def page(name: str, names: list[str]) -> str:
    """A page: its modules in order."""
    title = {"specjax": "specjax", "engine": "The engine"}.get(name, f"specjax.{name}")
    parts = [f"{title}\n{'=' * len(title)}"]
    for module in names:
        if len(names) > 1:
            parts.append(f"{module}\n{'-' * len(module)}")
        parts.append(section(module))
    return "\n\n".join(parts)


def section(module: str) -> str:
    """A module: its docstring, what it defines, and links to what it takes from other modules."""
    own = [name for name in public(module) if home(module, name) == f"{module}.{name}"]
    links = [name for name in public(module) if name not in own]
    text = f".. automodule:: {module}"
    if own:
        text += f"\n   :members: {', '.join(own)}"
    if links:
        text += f"\n\nNames of ``{module}`` that are defined in other modules:\n"
    loaded = importlib.import_module(module)
    for name in links:
        first = (inspect.getdoc(getattr(loaded, name)) or "").partition("\n\n")[0]
        text += f"\n- :py:obj:`{name} <{home(module, name)}>`: {' '.join(first.split())}"
    return text


def public(module: str) -> list[str]:
    """The public functions and classes of a module."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None)
    if names is None:
        names = [
            name
            for name, thing in vars(loaded).items()
            if not name.startswith("_") and getattr(thing, "__module__", None) == module
        ]
    return [name for name in names if _is_code(getattr(loaded, name))]


def _is_code(thing: object) -> bool:
    return inspect.isclass(thing) or (
        callable(thing) and bool(getattr(thing, "__qualname__", "")) and not inspect.ismodule(thing)
    )


def home(module: str, name: str) -> str:
    """The full name under which the reference has a public name of a module."""
    thing = getattr(importlib.import_module(module), name)
    where = getattr(thing, "__module__", "")
    if where in modules() and name in public(where) and where != module:
        return f"{where}.{thing.__qualname__}"
    return f"{module}.{name}"


def required() -> Iterator[str]:
    """The full names that the reference must have: all modules, and what their __all__ name."""
    for module in modules():
        yield module
        if hasattr(importlib.import_module(module), "__all__"):
            yield from (home(module, name) for name in public(module))


def aliases() -> list[str]:
    """Public names that are neither functions nor classes, such as the types of arguments."""
    return [
        f"{module}.{name}"
        for module in modules()
        for name, thing in vars(importlib.import_module(module)).items()
        if not name.startswith("_") and not _is_code(thing) and not inspect.ismodule(thing)
    ]


def undocumented() -> list[str]:
    """Public functions and classes without a docstring: autodoc leaves them out."""
    names = []
    for module in modules():
        loaded = importlib.import_module(module)
        for name in public(module):
            thing = getattr(loaded, name)
            if not inspect.getdoc(thing):
                names.append(f"{module}.{name}")
    return names


def process_docstring(app, what, name, obj, options, lines) -> None:
    """Code as literal blocks; the fields of a class with their comments, as a list."""
    del app, name, options
    lines[:] = literal_blocks(lines)
    if what == "class" and not issubclass(obj, enum.Enum):
        comments = field_comments(obj)
        if comments:
            lines += ["", "Fields:", ""]
            for field, comment in comments.items():
                text = comment.replace("\\", "\\\\").replace("*", r"\*").replace("|", r"\|")
                text = re.sub(r"(?<!`)`(?!`)", r"\\`", text)
                text = re.sub(r"(\w)_(?=\W|$)", r"\1\\_", text)
                lines.append(f"- ``{field}``: {text}" if text else f"- ``{field}``")
            lines.append("")


def skip_member(app, what, name, obj, skip, options) -> bool | None:
    """Leaves out the fields of named tuples: they are in the list of the class."""
    del app, options
    if name == "replace":  # flax gives it to every class of arrays
        return True
    if what == "class" and not (inspect.isroutine(obj) or isinstance(obj, property)):
        return True
    return skip or None
