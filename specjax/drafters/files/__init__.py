"""What ``make`` of a trained drafter begins with: its target, and stored parameters or none."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.drafters.files import codec as codecs
from specjax.drafters.shared_keys import StoredKeys
from specjax.errors import UserError
from specjax.types import LM, Params


class Ends(NamedTuple):
    """What heads use of their target: the width E, the first and the last map (see ``LM``)."""

    width: int
    embed: Callable[[Params, jax.Array], jax.Array]
    unembed: Callable[[Params, jax.Array], jax.Array]

    def output_kernel(self, target_params: Params) -> jax.Array:
        """The LM head as a matrix f32[E,V], bit for bit if its parameters are float32."""
        # By default accelerators multiply float32 in fewer bits.
        with jax.default_matmul_precision("highest"):
            return self.unembed(target_params, jnp.eye(self.width))


def ends(name: str, target: LM) -> Ends:
    """Raises UserError for a target without features."""
    if target.embed is None or target.unembed is None or target.width is None:
        lacks = [each for each in ("width", "embed", "unembed") if getattr(target, each) is None]
        raise UserError(
            f"{name} reads the features of its target, and {target.name} has none: it lacks "
            f"{', '.join(lacks)}"
        )
    return Ends(target.width, target.embed, target.unembed)


AnyKeys = TypeVar("AnyKeys", bound=StoredKeys)


class Given(NamedTuple):
    """The target's ends, and the heads."""

    ends: Ends
    params: Params  # of the heads; None: there are no parameters yet
    config: dict[str, Any]  # config.json of their files; {} without files

    def agree(self, name: str, keys: AnyKeys, **found: Any) -> AnyKeys:
        """The keys of the drafter ``name``, with the values of its stored or new parameters.

        With ``found``, values that were computed otherwise, only those are compared. Raises
        UserError for a key that was given and differs; of a key with ``override`` the given value
        is taken, with a warning.
        """
        changed = {}
        for key in declare.keys_of(type(keys)):
            asked = getattr(keys, key.name)
            if self.params is None:
                own = key.facts.new if asked == key.default else None
            else:
                own = found.get(key.name) if found else key.stored(self.params, self.config)
            own = tuple(own) if isinstance(own, list) else own
            if own is None:
                continue
            if asked in (key.default, own):
                changed[key.name] = own
                continue
            differs = f"{key.name} is {asked!r:.60}, and the given {name} has {own!r:.60}"
            if not key.facts.override:
                raise UserError(f"{differs}; leave it out")
            warnings.warn(f"{differs} by its files; {asked!r} is taken", stacklevel=2)
        return dataclasses.replace(keys, **changed) if changed else keys

    def init_params(self, name: str) -> Callable[[Any], Params]:
        """``Drafter.init_params`` of the drafter ``name``, which gives the stored parameters."""
        return Bound(_stored, name, self.params)


def _stored(name: str, params: Params, key: Any) -> Params:
    if params is None:
        raise UserError(
            f"{name} has no parameters yet; give model=, a directory of trained ones (mode train "
            "makes them)"
        )
    return params


def read(name: str, target: LM, keys: AnyKeys, features: bool = True) -> tuple[Given, AnyKeys]:
    """The heads that the keys ``model`` or ``params`` give, and the keys that agree with them.

    Raises UserError.

    ``features``: whether they read the target's features, whose width files must then have. Warns
    of files with a key that has two meanings, with the one that was taken.
    """
    own = ends(name, target)
    if getattr(keys, "probe", False):
        raise UserError(
            f"{name} has probe, which is for modes generate, chat, bench and online, and load(); "
            "leave it out, or give a directory that convert_heads --probe has written"
        )
    if keys.model:
        params, config = _from_files(name, target, keys.model, keys, features)
    else:
        params, config = _from_params(name, target, keys, features), {}
    given = Given(own, params, config)
    return given, given.agree(name, keys)


def facts(keys: type[StoredKeys], made: Any) -> tuple[tuple[str, Any], ...]:
    """What config.json must hold of the keys that no tensor shows; ``made`` has their values."""
    named = [(key.facts.fact, key.name) for key in declare.keys_of(keys) if key.facts.fact]
    return tuple((fact, getattr(made, name)) for fact, name in named if hasattr(made, name))


def _from_params(name: str, target: LM, keys: StoredKeys, features: bool) -> Params:
    if keys.dtype is not None:
        raise UserError(
            f"{name} has a dtype, in which files are read, and no files; give model, or leave "
            "dtype out"
        )
    codec = codecs.of(name)
    if keys.params is not None and features and codec is not None:
        codec.check(keys.params, {"D": target.width or 0, "V": target.vocab_size})
    elif keys.params is not None and not isinstance(keys.params, Mapping):
        raise UserError(
            f"the parameters are not those of {name}: {keys.params!r:.40}; give a tree of arrays, "
            "or model for a directory"
        )
    return keys.params


def _from_files(
    name: str, target: LM, model: Any, keys: StoredKeys, features: bool
) -> tuple[Params, dict[str, Any]]:
    if keys.params is not None:
        raise UserError(f"{name} was given params and a directory {model}; give one of them")
    # Imported here: drafters made from parameters need no file formats.
    from specjax.drafters.files import head_files

    codec = codecs.of(name)
    in_memory = isinstance(model, head_files.Head)
    head: Any = model if in_memory else head_files.read(model, name, dtype=keys.dtype)
    solution = "use heads that were trained for this target"
    for key, what, own in (
        ("hidden_size", "features of width", target.width if features else None),
        ("vocab_size", "a vocabulary of", target.vocab_size),
    ):
        # What a drafter outside the package states under these names is its own.
        usual = None if codec is None else head.config.get(key)
        stored = head.config.get(f"target_{key}", usual)
        if stored is not None and own is not None and stored != own:
            raise UserError(
                f"{head.directory} is made for {what} {stored}, and the target has {own}; "
                f"{solution}"
            )
    vocabulary = head.config.get("vocabulary")
    if vocabulary and target.vocabulary and vocabulary != target.vocabulary:
        raise UserError(f"{head.directory} was trained for a target with other tokens; {solution}")
    for key, note in head.config.get("read_as", {}).items():
        if codec is not None and note in codec.doubts and not in_memory:
            # The text does not depend on it, but a wrong reading makes drafts worse.
            warnings.warn(f"{head.directory}: {key}: {note}", stacklevel=2)
    return head.params, head.config
