"""Controllers of the draft length, one per file: they decide per row whether a draft goes on.

A controller is asked before each level of a draft, with what is computed at that moment
(``Ahead``): the draft's logits at its places, and the paths up to them. It never gets a token of
the level itself or of a later one. If the length of a draft depended on the tokens that are then
left out, the output law would change (the example of DSpark, 2607.05147, appendix A).

The file name is the registry: ``control.parse("threshold:0.4")``.
"""

from __future__ import annotations

from specjax import registry
from specjax.control._types import Ahead, Controller
from specjax.errors import UserError

__all__ = ["Ahead", "Controller", "load", "names", "parse"]


def names() -> list[str]:
    """The controllers that can be loaded."""
    return registry.names(__name__)


def load(name: str, **keys: float) -> Controller:
    """The controller ``name``, made with ``keys``. Raises UserError for an unknown name or key."""
    return registry.call(__name__, name, "controller", **keys)


def parse(text: str | Controller) -> Controller | None:
    """The controller that a user specified; None for "".

    ``text`` is a name and the values of its keys: "threshold:0.4", or "threshold:least=0.4".

    Raises:
        UserError: an unknown name or key, a value that is not a number, too many values.
    """
    if isinstance(text, Controller):
        return text
    if not isinstance(text, str):
        raise UserError(f"control is {text!r}; give a controller, as in 'threshold:0.4'")
    if not text:
        return None
    name, _, rest = text.partition(":")
    keys = list(registry.keys_of(registry.load(__name__, name, "controller")))
    parts = [part.strip() for part in rest.split(",")] if rest else []
    if len(parts) > len(keys):
        raise UserError(f"control is {text!r}; {name} takes {len(keys)} values ({', '.join(keys)})")
    values = {}
    for place, part in enumerate(parts):
        key, equals, value = part.rpartition("=")
        values[key.strip() if equals else keys[place]] = _number(text, value)
    return load(name, **values)._replace(name=text)


def _number(text: str, value: str) -> float:
    """An int where the text is one, otherwise a float."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise UserError(f"control is {text!r}; {value!r} is not a number, as in 'threshold:0.4'")
