"""Controllers of the draft length, one per file: they decide per row whether a draft goes on.

A controller is asked before each level of a draft, with what is computed at that moment
(``Ahead``): the draft's logits at its places, and the paths up to them. It never gets a token of
the level itself or of a later one. If the length of a draft depended on the tokens that are then
left out, the output law would change (the example of DSpark, 2607.05147, appendix A).

Some controllers know the longest draft of a round before it begins (``Controller.limit``); they
also limit the drafts of lookups.

The file name is the registry: ``control.parse("threshold:0.4")``.
"""

from __future__ import annotations

import contextlib
import os

from specjax import registry
from specjax.control._controller import Ahead, Controller, check_tree, longest, sized
from specjax.errors import UserError

# Modules of this folder that are no controllers.
HELPERS = ("costs",)

__all__ = [
    "Ahead",
    "Controller",
    "check_tree",
    "limiting",
    "load",
    "longest",
    "names",
    "parse",
    "read",
    "sized",
    "wants_policies",
    "wants_profile",
    "with_profile",
]


def names() -> list[str]:
    """The controllers that can be loaded."""
    return registry.names(__name__)


def limiting() -> list[str]:
    """The controllers that any drafter takes: they know the longest draft before the round."""
    return [name for name in names() if getattr(registry.load(__name__, name, ""), "LIMITS", False)]


def load(name: str, **keys: float | str) -> Controller:
    """The controller ``name``, made with ``keys``. Raises UserError for an unknown name or key."""
    return registry.call(__name__, name, "controller", Controller, **keys)


def parse(text: str | Controller) -> Controller | None:
    """The controller that a user specified; None for "".

    ``text`` is a name and the values of its keys: "threshold:0.4", or "threshold:least=0.4". A
    controller outside the package is "my_module:make", or "my_module:make:0.4".

    Raises:
        UserError: an unknown name or key, a value that is no number where one belongs, too many
            values.
    """
    if isinstance(text, Controller):
        return text
    if not isinstance(text, str):
        raise UserError(f"control is {text!r}; give a controller, as in 'threshold:0.4'")
    if not text:
        return None
    name, values = read(text)
    return load(name, **values)._replace(name=text)


def read(text: str) -> tuple[str, dict[str, float | str]]:
    """The name of a controller and the values of its keys, of a text as ``parse`` takes it.

    Raises UserError.
    """
    name, _, rest = text.partition(":")
    if name not in names():
        attribute, _, later = rest.partition(":")
        if all(part.isidentifier() for part in attribute.split(".")):
            # "my_module:make", then its values.
            name, rest = f"{name}:{attribute}", later
    known = registry.keys_of(registry.load(__name__, name, "controller"))
    keys = list(known)
    parts = [part.strip() for part in rest.split(",")] if rest else []
    if len(parts) > len(keys):
        raise UserError(f"control is {text!r}; {name} takes {len(keys)} values ({', '.join(keys)})")
    values: dict[str, float | str] = {}
    for place, part in enumerate(parts):
        key, equals, value = part.partition("=")
        key, value = (key.strip(), value) if equals else (keys[place], part)
        word = key in known and known[key].type is str
        values[key] = value.strip() if word else _number(text, value)
    return name, values


def wants_profile(text: str | Controller | None) -> bool:
    """Whether the controller reads measured costs, and the text names neither a file nor costs."""
    if not isinstance(text, str) or not text:
        return False
    name, values = read(text)
    keys = registry.keys_of(registry.load(__name__, name, "controller"))
    return "profile" in keys and values.keys().isdisjoint(("profile", "draft", "verify"))


def wants_policies(text: str | Controller | None) -> bool:
    """Whether a profile for this controller needs the policies of ``ltd``."""
    return isinstance(text, str) and wants_profile(text) and read(text)[0] == "ltd"


def with_profile(text: str, path: str | os.PathLike) -> str:
    """The text of a controller that reads its costs from this file. Raises UserError."""
    if "," in str(path):
        raise UserError(
            f"the cost profile would be {path}, and a controller's keys cannot name a path with a "
            "comma; choose another --workdir"
        )
    return f"{text}{',' if read(text)[1] else ':'}profile={path}"


def _number(text: str, value: str) -> float:
    """An int where the text is one, otherwise a float."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    raise UserError(f"control is {text!r}; {value!r} is not a number, as in 'threshold:0.4'")
