"""The tensor names of Spec-Drafter's network: those of T5, and the embeddings of the masks.

The names are specjax's: the authors' files are of fairseq. Letters: D width, A width of an
attention's queries, N heads, F width of the feed-forward, R buckets of positions, K masks, V
vocabulary size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from specjax.models import t5_names
from specjax.models.head_places import Layout, Place, listed

_MASKS = "mask_embeddings.weight"
_ATTENTION = {"q": "D A", "k": "D A", "v": "D A", "o": "A D"}
_MLP = {"gate": "D F", "up": "D F", "down": "F D"}


def of_names(names: Collection[str]) -> Layout:
    """The complete layout of a file with these tensor names; some may be missing in the file."""

    def count(stack: str) -> int:
        pattern = re.compile(rf"{stack}\.block\.(\d+)\.")
        return len({match[1] for name in names if (match := pattern.match(name))})

    gated = any(".wi_0." in name for name in names)
    return _layout(count("encoder"), count("decoder"), gated, "lm_head.weight" in names)


def of_leaves(leaves: Mapping[tuple, Any], layout: str = "") -> Layout:
    """The layout for these parameters; there is one."""
    del layout
    counts = listed(leaves, "source_layers"), listed(leaves, "layers")
    gated = ("layers", "0", "mlp", "gate", "kernel") in leaves
    return _layout(*counts, gated, ("head", "kernel") in leaves)


def _layout(encoder: int, decoder: int, gated: bool, head: bool) -> Layout:
    layout: Layout = {_MASKS: Place(("masks",), (), "K D")}
    for path, dims in _leaves(encoder, decoder, gated, head):
        name = t5_names.name_of(path, gated)
        layout[name] = Place(path, (), dims, path[-1] == "kernel")
    return layout


def _leaves(
    encoder: int, decoder: int, gated: bool, head: bool
) -> Iterator[tuple[tuple[str, ...], str]]:
    """The paths of the parameters, and their dimensions; the masks' are left out."""
    yield ("embed", "embedding"), "V D"
    for stack, bias, norm, count in (
        ("source_layers", "source_bias", "source_norm", encoder),
        ("layers", "bias", "norm", decoder),
    ):
        yield (bias, "table", "embedding"), "R N"
        yield (norm, "scale"), "D"
        for layer in map(str, range(count)):
            parts = {"attention": _ATTENTION, "cross": _ATTENTION, "mlp": _MLP}
            for part, maps in parts.items():
                if part == "cross" and stack == "source_layers":
                    continue
                yield (stack, layer, f"{part}_norm", "scale"), "D"
                for name, dims in maps.items():
                    if name != "gate" or gated:
                        yield (stack, layer, part, name, "kernel"), dims
    if head:
        yield ("head", "kernel"), "D V"
