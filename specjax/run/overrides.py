"""The settings of a command line, --config.key=value: which keys exist, and what a mistake means.

Keys of drafters and rules outside the package are added to a configuration before its settings are
read, so that they are given like those of the others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict, config_dict
from ml_collections.config_flags import config_path

from specjax import accept, drafters, registry
from specjax.config import Config
from specjax.config import group as group_of
from specjax.errors import UserError
from specjax.run.settings import KEYS, foreign, label_of, trained, types_of

_TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    tuple: "values in parentheses, such as (1, 2)",
    str: "a text",
    ConfigDict: "keys in braces",
}


class Override(NamedTuple):
    """One setting of the command line."""

    path: str  # "drafter.gamma"
    value: str | None  # None: --config.key, for a key that is True or False


def given(argv: Sequence[str]) -> list[Override]:
    """The settings in a command line, in order."""
    result = []
    for this, following in zip(argv, [*argv[1:], "-"], strict=True):
        if match := re.fullmatch(r"--?(no)?config\.([^=]+)(?:=(.*))?", this, re.DOTALL):
            value = match[3]
            if value is None and not match[1] and not following.startswith("-"):
                value = following
            result.append(Override(match[2], value))
    return result


def add_own_keys(config: Config, overrides: Sequence[Override]) -> None:
    """Adds the keys of drafters and rules that are named "my_module:make" to the configuration.

    Such names are in the configuration or in the overrides. A key is added with the value None,
    which means the default. Raises UserError if the object cannot be imported.
    """
    for path, name in dict([*leaves(config), *overrides]).items():
        if not registry.is_import(name):
            continue
        group, _, last = path.rpartition(".")
        if last == "name":
            module = drafters.load(name)
            _add(config, group, module)
            loss = getattr(module.make, "loss", None)
            own = loss is not None or config.get("objective") == "heads"
            if group == "drafter" and own and "loss" in config:
                values: Any = config.loss
                with config.unlocked():  # values of declared keys stay, other keys go
                    config.loss = group_of(loss, **values) if loss else ConfigDict()
        elif last == "accept":
            module = registry.load(accept.__name__, name, "acceptance rule")
            _add(config, f"{group}.accept_keys".lstrip("."), module)


def _add(config: Config, path: str, module: Any) -> None:
    *above, last = path.split(".")
    group: Any = config
    for part in above:
        group = group.get(part) if isinstance(group, ConfigDict) else None
    if not isinstance(group, ConfigDict):
        return  # an unknown key, which ``check`` reports
    with config.unlocked():
        if last not in group:
            group[last] = ConfigDict()
        group = group[last]
        if not isinstance(group, ConfigDict):
            return
        for key, kind in types_of(module).items():
            if group.get(key) is None:
                # Replaces the key of another drafter, which may have another type.
                if key in group:
                    del group[key]
                group[key] = config_dict.placeholder(kind)


def choose_methods(config: Config, text: str, overrides: Sequence[Override]) -> None:
    """Replaces ``config.grid.methods`` by the methods in ``text``, separated by commas.

    A name is a label of ``config.grid.methods``, whose settings are kept, or a drafter, with its
    default keys. Raises UserError.
    """
    grid = config.get("grid")
    if not isinstance(grid, ConfigDict) or "methods" not in grid:
        raise UserError(
            f"--methods is for modes bench and replay, and config.mode is {config.get('mode')!r}; "
            "start from configs/bench.py, or give --config.drafter.name"
        )
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    if not wanted or len(set(wanted)) < len(wanted):
        raise UserError(f"--methods is {text!r}; give different names, separated by commas")
    for path, _ in overrides:
        if path.startswith("drafter."):
            raise UserError(
                f"config.{path} is for a single method, and --methods is given; "
                f"give --config.grid.methods.{label_of(wanted[0])}.{path.partition('.')[2]}"
            )
    chosen, known = ConfigDict(), config.grid.methods
    for name in wanted:
        chosen[label_of(name)] = known[name] if name in known else _method(name, list(known))
    with config.unlocked():
        grid.methods = chosen


def _method(name: str, labels: list[str]) -> ConfigDict:
    """The keys of the drafter ``name``, without values. Raises UserError."""
    if not registry.is_import(name) and name not in drafters.names():
        hint = registry.nearest(name, [*labels, *drafters.names()])
        names = ", ".join(dict.fromkeys([*labels, *drafters.names()]))
        raise UserError(f"--methods: there is no drafter {name!r}{hint or f'; choose of {names}'}")
    keys = trained(name, accept="", accept_keys=ConfigDict())
    keys.warm = config_dict.placeholder(bool)
    return keys


def check(config: Config, overrides: Sequence[Override]) -> None:
    """Raises UserError for a key that the configuration does not have; it names near ones."""
    for path, _ in overrides:
        group, parts = config, path.split(".")
        if re.search(r"[\[\]]", path):
            continue  # an element of a tuple: ml_collections checks it
        for number, part in enumerate(parts):
            if not isinstance(group, ConfigDict):
                raise UserError(
                    f"unknown configuration key {part!r}: "
                    f"config.{'.'.join(parts[:number])} is {group!r} and has no keys"
                )
            if part not in group:
                mode = config.get("mode")
                if not number and mode in KEYS and any(part in names for names in KEYS.values()):
                    raise UserError(foreign(part, mode))
                raise UserError(
                    f"unknown configuration key {part!r} in config.{path}; "
                    f"{near(config, group, '.'.join(parts[number:]))}"
                )
            group = group[part]


def near(config: Config, group: Config, path: str) -> str:
    """What a message says about an unknown key: near keys of its group, or of another group."""
    key = path.split(".")[0]
    if close := difflib.get_close_matches(key, list(group), 1, 0.75):
        return f"did you mean {close[0]}?"
    last = path.rpartition(".")[2]
    paths = [each for each, _ in leaves(config)]
    lasts = {each.rpartition(".")[2] for each in paths}
    close = difflib.get_close_matches(last, lasts, 1, 0.8)  # the same name, if there is one
    if same := [each for each in paths if each.rpartition(".")[2] in close]:
        return f"did you mean config.{min(same, key=lambda each: each.count('.'))}?"
    return "--help with --config=FILE lists the keys"


def leaves(config: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every key that is no group of keys; empty groups count as values."""
    for key in config:
        value = config[key]
        if isinstance(value, ConfigDict) and len(value):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def type_error(config: Config, overrides: Sequence[Override], message: str) -> str | None:
    """A value of the wrong type, in words; None if ``message`` is about something else."""
    for path, value in reversed(overrides):
        if f"config.{path}={value}" in message or f"config.{path}'" in message:
            kind: Any = config_path.get_type(path, config)
            wanted = _TYPES.get(kind, kind.__name__)
            return f"--config.{path}={value!s:.60}: {value!r:.60} is not {wanted} ({kind.__name__})"
    return None
