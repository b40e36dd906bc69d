"""Configurations: their type in signatures, and what is common to reading them.

Only ``specjax.run`` and ``specjax.train.recipes`` see a configuration. They turn it into plain
objects, which everything below takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias, TypeVar

from ml_collections import ConfigDict, config_dict

from specjax import declare
from specjax.errors import UserError

# An ml_collections.ConfigDict. Its attributes are known only at run time.
Config: TypeAlias = Any

AnyKeys = TypeVar("AnyKeys", bound=declare.Keys)


def group(keys: type[declare.Keys], names: Collection[str] | None = None, **values: Any) -> Config:
    """The keys that a dataclass declares as a group of a configuration; ``values`` replace some.

    ``names`` are the keys that the group has; "train.steps" is a key of a group inside. None: all.
    """
    result = ConfigDict()
    for key in declare.keys_of(keys):
        facts, start = key.facts, f"{key.name}."
        inner = [each.removeprefix(start) for each in names or () if each.startswith(start)]
        if facts.python or not (names is None or key.name in names or inner):
            continue
        value = values.get(key.name)
        if facts.free:
            value = _free(facts.group, value or {})
        elif facts.group is not None:
            value = group(facts.group, inner or None, **(value or {}))
        elif value is None:
            value = key.default
        result[key.name] = config_dict.placeholder(key.type) if value is None else value
    return result


def _free(keys: type[declare.Keys] | None, values: Mapping[str, Any]) -> Config:
    """A group of the given keys; one without a value has the type that ``keys`` declares."""
    if keys is None:
        return values if isinstance(values, ConfigDict) else ConfigDict(values)
    result = group(keys, list(values), **values)
    # References keep the types of keys without a value.
    for name, value in ConfigDict(values).items(preserve_field_references=True):
        if name not in result:
            result[name] = value
    return result


def read(keys: type[AnyKeys], own: Config, **more: Any) -> AnyKeys:
    """A group of a configuration as checked keys; those that are left out have their defaults.

    ``more`` are keys that no configuration has. Raises UserError for an unknown key, and for a
    value out of range.
    """
    known = {key.name: key for key in declare.keys_of(keys)}
    for name, value in own.items():
        if name not in known:
            raise UserError(f"{keys.OWNER}{name} is unknown; the keys are {', '.join(known)}")
        facts = known[name].facts
        if (facts.free or facts.group) and not isinstance(value, Mapping | ConfigDict | None):
            raise UserError(f"{keys.OWNER}{name} is {value!r}; it must hold keys")
        if isinstance(value, Mapping | ConfigDict):
            if facts.free or facts.group is None:
                value = value.to_dict() if isinstance(value, ConfigDict) else dict(value)
            else:
                value = read(facts.group, value)
        if value is not None:
            more[name] = value
    for key in known.values():
        if key.required and key.name not in more:
            raise UserError(f"{keys.OWNER}{key.name} is missing; {key.facts.help}")
    return keys(**more)


def given(keys: Mapping | None) -> dict:
    """The keys that have a value, as a plain dict, without None and empty groups at any depth."""
    values = {k: given(v) if hasattr(v, "items") else v for k, v in (keys or {}).items()}
    return {k: v for k, v in values.items() if v is not None and v != {}}
