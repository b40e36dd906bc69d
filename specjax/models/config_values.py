"""Numbers and switches of a config.json, checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from specjax.errors import UserError

# Names of the id of the token that stands for unknown ones, in the files of parallel drafters.
MASK_IDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# What config.json alone says of the decoder layers.
OF_LAYERS = (
    *("num_attention_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "layer_types", "sliding_window"),
)
# What 32 bits hold.
_MOST = {int: 2**31 - 1, float: float(np.finfo(np.float32).max)}


def value_of(
    raw: Mapping[str, Any], key: str, kind: type = int, default: Any = None, where: object = ""
) -> Any:
    """A number above 0 and at most ``_MOST``, or a boolean; null means ``default``.

    Raises UserError, which begins with ``where``, for another value, and where there is neither a
    value nor a default.
    """
    value = default if raw.get(key) is None else raw[key]
    valid = isinstance(value, (int, kind)) and isinstance(value, bool) == (kind is bool)
    if not valid or (kind is not bool and not 0 < value <= _MOST[kind]):
        expected = f"a positive {'integer below 2**31' if kind is int else 'number'}"
        raise UserError(
            f"{_front(where)}{key} is {'missing' if value is None else repr(value)[:60]}; "
            f"it must be {'true or false' if kind is bool else expected}"
        )
    return value


def _front(where: object) -> str:
    return f"{where}: " if where else ""


def token_id(
    raw: Mapping[str, Any], key: str, least: int = -_MOST[int], where: object = ""
) -> int | None:
    """The token id under ``key``, at least ``least``; None: missing or null. Raises UserError."""
    value = raw.get(key)
    if value is not None and (type(value) is not int or not least <= value <= _MOST[int]):
        raise UserError(f"{_front(where)}{key} is {value!r}; it must be a token id")
    return value


def check_supported(
    what: str, value: Any, allowed: Iterable[Any], where: object = "", of: str = ""
) -> None:
    """Raises UserError unless ``value`` is one of ``allowed``.

    ``of`` comes after "is not supported" in the message.
    """
    known = list(allowed)
    if value not in known:
        front = f"{_front(where)}{what} {value!r} is not supported{of}"
        raise UserError(f"{front}; supported: {', '.join(map(str, known))}")


def check_read(config: Any, back: Any, architecture: str) -> None:
    """Raises UserError for a field in which ``back``, read from what was written, differs."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(back, field.name):
            raise UserError(f"a {architecture} cannot have {field.name} {value!r}")


def object_of(raw: Mapping[str, Any], key: str, where: object = "") -> dict[str, Any]:
    """The object under ``key``; empty if it is missing or null. Raises UserError otherwise."""
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{_front(where)}{key} is {value!r}; it must be an object or null")
    return value or {}


def check_method(
    where: object, raw: Mapping[str, Any], kind: str, methods: Collection[str]
) -> str | None:
    """The method in a file of the vLLM speculators library; None: no such file.

    Raises UserError for another one than those of the heads ``kind``.
    """
    method = raw.get("speculators_model_type")
    if method is not None:
        check_supported("speculators_model_type", method, methods, where, f" for {kind} heads")
    return method


def check_only(
    where: object, values: Mapping[str, Any], only: Mapping[str, Any], prefix: str = ""
) -> None:
    """Raises UserError for a key with another value than the ``only`` one that is computed."""
    for key, expected in only.items():
        if values.get(key) is not None:
            check_supported(f"{prefix}{key}", values[key], [expected], where)


def check_part(
    where: object, values: Mapping[str, Any], key: str, present: bool, part: str
) -> None:
    """Raises UserError if a key states another thing of a part than the tensors show."""
    stated = values.get(key)
    if stated is not None and bool(stated) != present:
        raise UserError(
            f"{where}: {key} is {json.dumps(stated)}, and the tensors "
            f"{'have' if present else 'lack'} {part}; correct config.json"
        )


def check_equal(
    where: object, raw: Mapping[str, Any], name: str, inner: Mapping[str, Any], keys: Iterable[str]
) -> None:
    """Raises UserError if one of the keys has another value in the object ``name`` than outside."""
    for key in keys:
        agreed(where, {key: raw.get(key), f"{name}.{key}": inner.get(key)})


def whole_of(where: object, values: Mapping[str, Any], key: str) -> int | None:
    """A positive whole number of config.json; None: not given. Raises UserError."""
    return None if values.get(key) is None else value_of(values, key, int, None, where)


def agreed(where: object, stated: Mapping[str, Any]) -> Any:
    """The value of all these keys that have one; None: there is none. Raises UserError."""
    given = [(key, value) for key, value in stated.items() if value is not None]
    for key, value in given[1:]:
        if value != given[0][1]:
            first = f"{_front(where)}{given[0][0]} is {given[0][1]!r}"
            raise UserError(f"{first} and {key} is {value!r}; they must be equal")
    return given[0][1] if given else None


def names_of(where: object, raw: Mapping[str, Any], key: str) -> list[str]:
    """The list of names under ``key``; empty if it is missing or null. Raises UserError."""
    value = raw.get(key)
    names = [] if value is None else value
    if not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{_front(where)}{key} is {value!r}; it must be a list of names")
    return list(names)


def check_layers(where: object, name: str, value: Any) -> None:
    """Raises UserError unless ``value`` is a list of different layer numbers."""
    valid = isinstance(value, list | tuple) and bool(value) and all(type(i) is int for i in value)
    if not valid or min(value) < 0 or len(set(value)) < len(value):
        raise UserError(
            f"{where}: {name} is {value!r}; it must be a list of different layer numbers"
        )


def agreed_layers(
    where: object, stated: Mapping[str, Any], meanings: Callable[..., list[list[int]]], hint: str
) -> list[int] | None:
    """The layers that the lists of all keys name; None: there is no list.

    ``meanings(key, ids)`` is what a list under a key may mean, in layers from 0, the likeliest
    first.
    Raises UserError, with the ``hint``, if the keys name different layers.
    """
    given = {key: ids for key, ids in stated.items() if ids is not None}
    for key, ids in given.items():
        check_layers(where, key, ids)
    readings = [meanings(key, ids) for key, ids in given.items()]
    agreed = [taps for taps in readings[0] if all(taps in x for x in readings)] if given else []
    if given and not agreed:
        named = " and ".join(f"{key} {ids}" for key, ids in given.items())
        raise UserError(f"{where}: {named} name different layers; {hint}")
    taps = next(iter(agreed), None)
    if taps is not None and min(taps) < 0:
        raise UserError(
            f"{where}: {next(key for key in given if 0 in given[key])} has 0, the embeddings of "
            "the tokens; only outputs of layers can be read, from 1"
        )
    return taps


def switch(where: object, values: Mapping[str, Any], key: str) -> bool | None:
    """A boolean of config.json; None: not given. Raises UserError for any other value."""
    return None if values.get(key) is None else value_of(values, key, bool, None, where)


def mask_id_of(where: object, values: Mapping[str, Any]) -> int | None:
    """The id of the mask under one of ``MASK_IDS``; None: not given. Raises UserError."""
    return agreed(where, {key: token_id(values, key, 0, where) for key in MASK_IDS})
