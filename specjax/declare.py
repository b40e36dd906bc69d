"""Declares what a method takes: its keys, with help, types and ranges.

A method's keys are the fields of a class, and ``method`` makes its function of them:

    class Keys(declare.Keys):
        gamma: int = key(4, "most tokens of a draft", least=1)

    @declare.method(Keys)
    def make(target: LM, keys: Keys) -> Drafter:

``make(target, gamma=2)`` checks the keys and calls the function. Command lines, ``--explain``, the
documentation and error messages are derived from the fields.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from specjax.checks import number, one_of, whole, yes_or_no
from specjax.errors import UserError

REQUIRED: Any = dataclasses.MISSING
_TYPES = {"int": int, "float": float, "bool": bool}

Made = TypeVar("Made")


class Facts(NamedTuple):
    """What the declaration of a key says besides its type and default."""

    help: str = ""
    least: float | None = None  # smallest value of a number
    above: float | None = None  # larger than this
    most: float | None = None  # largest value
    below: float | None = None  # smaller than this
    choices: tuple[str, ...] = ()  # the values of a text
    python: bool = False  # whether only Python code can give it
    parse: Callable[[Any], Any] | None = None  # from the forms that a user gives to the value
    # How stored parameters show the value; None and "": they do not.
    size: Callable[[Any], Any] | None = None  # a function of them: the value, or None
    part: str = ""  # the name of a subtree that they have, or have not
    fact: str = ""  # a key of their config.json
    missing: Any = None  # the value where config.json lacks ``fact``; None: then it is not known
    override: bool = False  # whether a value that a user gives wins, with a warning
    new: Any = None  # the value for new parameters; None: the method finds it
    example: Any = None  # a value where files would show it, and there are none
    once: bool = False  # of a tuple: whether each value may be there once only
    group: type[Keys] | None = None  # declares the keys of this group
    free: bool = False  # a group whose keys are declared elsewhere
    needs: str = ""  # another key, without which this one has no effect


class Key(NamedTuple):
    """A key of a method."""

    name: str
    annotation: str
    default: Any = REQUIRED
    facts: Facts = Facts()

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is REQUIRED

    @property
    def type(self) -> type:
        """The type in which a command line gives it: int, float, bool, tuple or str."""
        if self.annotation.startswith("tuple"):
            return tuple
        words = re.findall(r"[\w.]+", self.annotation.partition("[")[0])
        return str if "str" in words else next((_TYPES[w] for w in words if w in _TYPES), str)

    def check(self, value: Any, owner: str = "") -> None:
        """Raises UserError unless the value has the key's type and range."""
        kinds = {kind.strip() for kind in self.annotation.split("|")}
        if value is None and "None" in kinds:
            return
        name, facts = f"{owner}{self.name}", self.facts
        if inner := re.fullmatch(r"tuple\[(\w+), \.\.\.\]", self.annotation):
            if not isinstance(value, tuple):
                raise UserError(f"{name} is {value!r}; it must be a tuple of values")
            for one in value:
                Key(f"a value of {name}", inner[1], facts=facts).check(one)
            shown = {f"{one:g}" if inner[1] == "float" else one for one in value}
            if facts.once and len(shown) < len(value):
                raise UserError(f"{name} is {value!r}; give each value once")
        match sorted(kinds - {"None"}):
            case ["int"]:
                whole(name, value, None if facts.least is None else int(facts.least))
                if facts.most is not None:
                    number(name, value, f"from {facts.least:g} to {facts.most:g}", self._fits)
            case ["float"]:
                number(name, value, self._range(), self._fits)
            case ["bool"]:
                yes_or_no(name, value)
            case ["str"] if not isinstance(value, str):
                raise UserError(f"{name} is {value!r}; it must be a text")
            case ["str"] if facts.choices and value not in facts.choices:
                one_of(name, value, [each for each in facts.choices if each])

    def stored(self, params: Any, config: dict[str, Any]) -> Any:
        """The value in stored parameters and their config.json; None: they do not show it."""
        facts, value = self.facts, None
        if facts.part:
            return facts.part in params
        if facts.size is not None:
            try:
                value = facts.size(params)
            except (AttributeError, IndexError, KeyError, TypeError):
                return None  # not the method's parameters, which other checks refuse
        if value is None and facts.fact and config:
            value = config.get(facts.fact)
            if value is not None and self.type is int and self.default == 0:
                whole(f"{facts.fact} of the given parameters", value, 1)  # 0 is "not given"
            value = facts.missing if value is None else value
        if value is None or facts.parse is None:
            return value
        return facts.parse(value)

    def _fits(self, value: float) -> bool:
        tests = (operator.ge, operator.gt, operator.le, operator.lt)
        bounds = zip(tests, self.facts[1:5], strict=True)  # least, above, most, below
        return all(bound is None or test(value, bound) for test, bound in bounds)

    def _range(self) -> str:
        """The range in words."""
        least, above, most, below = self.facts[1:5]
        low = f"({above:g}" if above is not None else f"[{least:g}" if least is not None else ""
        high = f"{below:g})" if below is not None else f"{most:g}]" if most is not None else ""
        if low and high:
            return f"in {low}, {high}"
        text = {"[": ">= ", "(": "> "}.get(low[:1], "") + low[1:]
        return text or "that is finite"


def key(default: Any = REQUIRED, help: str = "", *, new: int | None = None, **facts: Any) -> Any:
    """A field that is a key. Without a default it must be given.

    Args:
        default: the value where the key is not given.
        help: what it is, in a few words.
        new: the value for new parameters where the key has its default; the help then says so.
        facts: further fields of ``Facts``.
    """
    if new is not None:
        help = f"{help}; {default!r}: as in the files, or {new} for new ones"
    return dataclasses.field(default=default, metadata={"key": Facts(help, new=new, **facts)})


def share(default: float, help: str) -> Any:
    """A key that is a number between 0 and 1."""
    return key(default, help, least=0, most=1)


def group(keys: type[Keys]) -> Any:
    """A field that is a group of keys, which a class declares."""
    return dataclasses.field(default_factory=keys, metadata={"key": Facts(group=keys)})


def free(help: str, keys: type[Keys] | None = None) -> Any:
    """A field that is a group of keys which a method chooses; ``keys`` declares known ones."""
    facts = Facts(help, group=keys, free=True)
    return dataclasses.field(default_factory=dict, metadata={"key": facts})


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys of a method. Raises UserError for a value out of range.

    A class that extends it becomes a frozen dataclass; it takes no decorator.
    """

    # What messages say before a key's name: ``class Own(declare.Keys, owner="config.own.")``.
    OWNER: ClassVar[str] = ""
    LENGTH: ClassVar[str] = ""  # of a drafter without ``gamma``: the key of its drafts' length

    def __init_subclass__(cls, owner: str = "", **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.OWNER = owner or cls.OWNER
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for each in keys_of(type(self)):
            value = getattr(self, each.name)
            if each.facts.parse is not None:
                value = each.facts.parse(value)
            elif each.type is tuple and isinstance(value, list):
                value = tuple(value)
            elif isinstance(value, np.integer | np.floating):
                value = value.item()  # what files and programs hold is Python's
            each.check(value, self.OWNER)
            object.__setattr__(self, each.name, value)
        self._check_effects()
        self.check()

    def _check_effects(self) -> None:
        for each in keys_of(type(self)):
            value, other = getattr(self, each.name), each.facts.needs
            if other and value != each.default and not (own := getattr(self, other)):
                name, other = f"{self.OWNER}{each.name}", f"{self.OWNER}{other}"
                raise UserError(
                    f"{name} is {value!r} and {other} is {own!r}, so it has no effect; give "
                    f"{other}, or leave {name} out"
                )

    def check(self) -> None:
        """Raises UserError for keys that do not go together."""

    def refuse(self, names: Iterable[str], where: str, right: str = "leave it out") -> None:
        """Raises UserError if one of these keys is not its default: it has no effect ``where``."""
        for name in names:
            if (value := getattr(self, name)) != getattr(type(self), name):
                named = f"{self.OWNER}{name}"
                raise UserError(f"{named} is {value!r} and has no effect {where}; {right}")


@functools.cache
def keys_of(keys: type[Keys]) -> tuple[Key, ...]:
    """The keys that a class declares: its own first, then those of each class it extends."""
    fields = {field.name: field for field in dataclasses.fields(keys)}
    names = [name for each in keys.__mro__ for name in inspect.get_annotations(each)]
    named = [fields[name] for name in dict.fromkeys(names) if name in fields]
    result = []
    for each in named:
        default = each.default if each.default_factory is REQUIRED else each.default_factory()  # type: ignore[misc]
        result.append(Key(each.name, _text(each.type), default, each.metadata.get("key", Facts())))
    return tuple(result)


def defaults(keys: type[Keys]) -> dict[str, Any]:
    """Name -> default, with the groups inside; without what must be given or a method chooses."""
    return {
        each.name: defaults(each.facts.group) if each.facts.group else each.default
        for each in keys_of(keys)
        if not (each.required or each.facts.free)
    }


def method(
    keys: type[Keys], loss: type[Keys] | None = None
) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Makes ``make(..., keys)`` a function of the keys by name; they are checked first.

    ``loss`` declares the keys of the loss of a drafter outside the package, config.loss.
    """

    def declared(make: Callable[..., Made]) -> Callable[..., Made]:
        @functools.wraps(make)
        def made(*args: Any, **given: Any) -> Made:
            named = [given.pop(name) for name in places[len(args) :] if name in given]
            return make(*args, *named, keys(**given))

        signature, kind = inspect.signature(make), inspect.Parameter.KEYWORD_ONLY
        parameters, hints = list(signature.parameters.values())[:-1], _hints(keys)
        places = [each.name for each in parameters]
        for each in keys_of(keys):
            default = inspect.Parameter.empty if each.required else each.default
            named = inspect.Parameter(each.name, kind, default=default, annotation=hints[each.name])
            parameters.append(named)
        made.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        made.keys, made.loss = keys, loss  # type: ignore[attr-defined]
        return made

    return declared


def _text(annotation: Any) -> str:
    """An annotation as it is written."""
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _hints(keys: type[Keys]) -> dict[str, Any]:
    """The types of the fields; texts where a name is known to type checkers alone."""
    try:
        return typing.get_type_hints(keys)
    except (NameError, AttributeError):
        return {each.name: each.annotation for each in keys_of(keys)}


def of(make: Callable[..., Any]) -> dict[str, Key]:
    """Name -> key, of a method's function; a function without a declaration has keys without help.

    Its keys are the keyword-only parameters, and those with a default.
    """
    declared = getattr(make, "keys", None)
    if declared is not None:
        return {each.name: each for each in keys_of(declared)}
    result = {}
    for name, parameter in inspect.signature(make).parameters.items():
        default, annotation = parameter.default, parameter.annotation
        required = default is parameter.empty
        named = parameter.kind is parameter.KEYWORD_ONLY
        if not named and (required or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD):
            continue
        if annotation is parameter.empty:
            annotation = str if required or default is None else type(default)
        result[name] = Key(name, _text(annotation), REQUIRED if required else default)
    return result
