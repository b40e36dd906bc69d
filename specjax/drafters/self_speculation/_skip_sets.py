"""Sets of sublayers that a draft leaves out: from keys and files to ``Sublayers``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax import files
from specjax.cache import KVBlock, MixedBlock
from specjax.drafters import _foresee
from specjax.errors import UserError
from specjax.files import buckets
from specjax.tree import Layout, chain_layout
from specjax.types import LM, Array, Context, ModelParams, Output, Params, Sublayers

# The file that a search writes into its directory, and the keys that are read of it.
FILE = "skips.json"
ATTENTION, MLP = "skip_attention", "skip_mlp"
FORM = "give layers, as in '3-6,9', or the file of a search"

Layers = str | os.PathLike | Sequence[int]


class Skips(NamedTuple):
    """The layers whose attention and whose feed-forward part are left out, ascending."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]

    def left(self, layers: int) -> Sublayers:
        """The sublayers that a model of so many layers still computes."""
        return Sublayers(*(tuple(n for n in range(layers) if n not in skipped) for skipped in self))


def read(target: LM, attention: Layers, mlp: Layers) -> Skips:
    """The set that the two keys name, each by numbers or by the file of a search.

    Raises UserError: layers that the target does not have, a set that leaves nothing, a search in a
    model with another number of layers.
    """
    keys = (ATTENTION, attention), (MLP, mlp)
    return check(target, Skips(*(layers(*each, target.layers) for each in keys)))


def layers(name: str, value: Layers, size: int | None = None) -> tuple[int, ...]:
    """Layer numbers, ascending, each once: of "3-6,9", of a sequence, or of a search's file.

    ``name`` is the key, and the entry of the file; ``size`` the number of layers that the model of
    the file must have. Raises UserError.
    """
    if isinstance(value, str | os.PathLike):
        if re.fullmatch(r"[\d\s,-]*", os.fspath(value)):
            return _numbers(name, os.fspath(value))
        value = _of_file(name, buckets.local(value), size)
    numbers = list(value) if isinstance(value, Sequence) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise UserError(f"{name} is {value!r}; {FORM}")
    return tuple(sorted(set(numbers)))


def files_of(choices: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """The files of the key ``choices``: names separated by commas, or a sequence of them.

    Raises UserError.
    """
    names: Any = choices.split(",") if isinstance(choices, str) and choices else choices or ()
    names = [names] if isinstance(names, os.PathLike) else names
    kinds = isinstance(names, Sequence) and all(isinstance(x, str | os.PathLike) for x in names)
    if not kinds:
        raise UserError(f"choices is {choices!r}; give files of searches, separated by commas")
    found = [os.fspath(name).strip() for name in names]
    for name in found:
        if re.fullmatch(r"[\d\s,-]*", name):
            raise UserError(f"choices has {name!r}; give files of searches, separated by commas")
    return found


def _numbers(name: str, text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"{name} is {text!r}; {FORM}")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def _of_file(name: str, path: Path, size: int | None) -> Sequence[int]:
    """The layers of this kind in a search's file, or in the file in its directory."""
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{name} is {str(path)!r}, and there is no such file; {FORM}")
    values = files.read_json(path)
    if not isinstance(values, dict) or name not in values or isinstance(values[name], str):
        raise UserError(f"{path} has no list {name}; give the {FILE} of a search")
    searched = values.get("layers")
    if None not in (size, searched) and size != searched:
        raise UserError(
            f"{path} was searched in a model of {searched} layers, and the target has {size}; "
            "search in the target"
        )
    return values[name]


def check(target: LM, skips: Skips) -> Skips:
    """The set, if the target has these layers and something is left. Raises UserError."""
    if target.layers is None:
        raise UserError(
            f"layer_skip leaves out layers of the target, and {target.name} does not give its "
            "layers; take a decoder of specjax.models"
        )
    for name, numbers in zip((ATTENTION, MLP), skips, strict=True):
        outside = [number for number in numbers if not 0 <= number < target.layers]
        if outside:
            raise UserError(
                f"{name} has layer {outside[0]}, and {target.name} has the layers 0 to "
                f"{target.layers - 1}; name some of these"
            )
    void = without_mlp(target)
    if none := [number for number in skips.mlp if number in void]:
        raise UserError(
            f"{MLP} has layer {none[0]}, which has no feed-forward part in {target.name}; leave it "
            "out"
        )
    left = skips.left(target.layers)
    if not left.attention and not {*left.mlp} - {*void}:
        raise UserError(
            "every attention and every feed-forward part is skipped, so the draft would not depend "
            "on the text; leave at least one of them"
        )
    return skips


def without_mlp(target: LM) -> tuple[int, ...]:
    """The layers of the target that have no feed-forward part."""
    decoder = target.inside.decoder
    return () if decoder is None else decoder.without_mlp


# What a draft of some sublayers computes along a whole text, in one pass.
#
# A draft token is computed with the target's own keys and values of the text before it. A plain
# pass of the part over the text would read the part's own ones instead, and give other logits.


def of_layers(block: Any, layers: tuple[int, ...]) -> Any:
    """The block of a decoder, with these layers alone."""
    if not isinstance(block, KVBlock | MixedBlock):
        return block  # of a table, which has no layers
    every = cache_lib.layers_of(block)
    return cache_lib.block_of([every[layer] for layer in layers], block.output)


def outputs(target: LM, part: Sublayers, params: Params, tokens: Array) -> tuple[Output, Output]:
    """The outputs of the target and of a draft's first step after each token of i32[B,T].

    ``params`` are the target's. The draft at token t reads the target's keys and values of the
    tokens before t, and computes its own for t.
    """
    out, block = target.apply(params, tokens, target.init_cache(tokens.shape[0], 0))
    return out, draft(target, part, params, tokens, block)


def draft(target: LM, part: Sublayers, params: Params, tokens: Array, block: Any) -> Output:
    """The second of ``outputs``, with the target's block of the text."""
    batch, size = tokens.shape
    place = jnp.arange(size)
    before, own = place < place[:, None], place == place[:, None]
    visible = jnp.broadcast_to(jnp.concatenate([before, own], 1), (batch, size, 2 * size))
    depth = chain_layout(batch, size).depth
    layout = Layout(visible, jnp.concatenate([depth, depth], 1))
    model, given = target.with_part(part), of_layers(block, part.attention)
    return model.apply(params, tokens, target.init_cache(batch, 0), layout, given)[0]


def probs(target: LM, part: Sublayers, params: ModelParams, context: Context) -> Array:
    """f32[B,S,V]: ``Drafter.probs`` of a draft with these sublayers."""
    logits = outputs(target, part, params.target, context.tokens)[1].logits
    return _foresee.probs_along(logits, context)
