"""What a family's ``make`` starts from: its target, and heads in files, as parameters, or none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.checks import whole
from specjax.drafters._keys import HeadKeys, NetworkKeys
from specjax.drafters.heads._family import Ends, ends
from specjax.errors import UserError
from specjax.models import head_layouts as layouts
from specjax.types import LM, Params


class Given(NamedTuple):
    """The target's ends, and the heads."""

    ends: Ends
    params: Params  # of the heads; None: there are no heads yet
    config: dict[str, Any]  # config.json of their files; {} without files


def read(name: str, target: LM, keys: HeadKeys | NetworkKeys, features: bool = True) -> Given:
    """The heads that the keys ``model`` or ``params`` give. Raises UserError.

    ``features``: whether they read the target's features, whose width files must then have. Warns
    of files with a key that has two meanings, with the one that was taken.
    """
    if isinstance(keys, HeadKeys):
        whole("heads", keys.heads, 0)
    own = ends(name, target)
    if keys.model:
        params, config = _from_files(name, target, keys.model, keys, features)
    else:
        params, config = _from_params(name, target, keys), {}
    return Given(own, params, config)


def sizes(
    stored: Sequence[int] | None, what: str = "heads have", /, **asked: tuple[int, int]
) -> tuple[int, ...]:
    """The sizes of stored heads, or those of new heads where ``stored`` is None.

    ``asked`` maps a key to (its value, the default for new heads); the value 0 means that the key
    was not given; ``what`` names the stored ones. Raises UserError for a value that differs from
    the stored size.
    """
    for name, (value, _) in asked.items():
        whole(name, value, 0)
    if stored is None:
        return tuple(value or default for value, default in asked.values())
    for (name, (value, _)), size in zip(asked.items(), stored, strict=True):
        if value not in (0, size):
            raise UserError(f"{name} is {value}, and the given {what} {size}; leave it out")
    return tuple(stored)


def _from_params(name: str, target: LM, keys: HeadKeys | NetworkKeys) -> Params:
    if keys.dtype is not None:
        raise UserError(
            f"{name} has a dtype, in which files are read, and no files; give model, or leave "
            "dtype out"
        )
    if keys.params is not None and isinstance(keys, HeadKeys):
        layouts.check(name, keys.params, {"D": target.width or 0, "V": target.vocab_size})
    # ``_eagle_shape`` checks the arrays of a draft network.
    elif keys.params is not None and not isinstance(keys.params, Mapping):
        raise UserError(
            f"the parameters are not those of {name}: {keys.params!r:.40}; give a tree of arrays, "
            "or model for a directory"
        )
    return keys.params


def _from_files(
    name: str,
    target: LM,
    model: str | os.PathLike,
    keys: HeadKeys | NetworkKeys,
    features: bool,
) -> tuple[Params, dict[str, Any]]:
    if keys.params is not None:
        raise UserError(f"{name} was given params and a directory {model}; give one of them")
    # Imported here: drafters made from parameters need no file formats.
    from specjax.models import eagle_dialects, head_files

    head = head_files.read(model, name, dtype=keys.dtype)
    solution = "use heads that were trained for this target"
    for key, what, own in (
        ("hidden_size", "features of width", target.width if features else None),
        ("vocab_size", "a vocabulary of", target.vocab_size),
    ):
        stored = head.config.get(f"target_{key}", head.config.get(key))
        if stored is not None and own is not None and stored != own:
            raise UserError(
                f"{head.directory} is made for {what} {stored}, and the target has {own}; "
                f"{solution}"
            )
    vocabulary = head.config.get("vocabulary")
    if vocabulary and target.vocabulary and vocabulary != target.vocabulary:
        raise UserError(f"{head.directory} was trained for a target with other tokens; {solution}")
    note = head.config.get("read_as", {}).get("norm_output")
    if note == eagle_dialects.AMBIGUOUS:
        # The text does not depend on it, but a wrong reading makes drafts worse.
        warnings.warn(f"{head.directory}: norm_output: {note}", stacklevel=2)
    return head.params, head.config
