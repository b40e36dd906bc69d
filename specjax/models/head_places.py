"""Places of a file's tensors among our parameters: the rows of the tables of tensor names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Place(NamedTuple):
    """The place of a file's tensor among the parameters."""

    path: tuple[str, ...]  # the leaf
    at: tuple[int, ...]  # index along its leading axes
    dims: str  # of the tensor in the parameters: letters; "3D" is three times D
    transposed: bool = False  # the file has the transposed tensor


# Name in the file -> its place.
Layout = dict[str, Place]


def linear(
    name: str, path: tuple[str, ...], index: tuple[int, ...], dims: str, bias: bool
) -> Layout:
    """The tensors of a linear map: (out, in) in files and (in, out) here."""
    layout = {f"{name}.weight": Place((*path, "kernel"), index, dims, True)}
    if bias:
        layout[f"{name}.bias"] = Place((*path, "bias"), index, dims.split()[-1])
    return layout


def factors(dims: str) -> list[tuple[int, str]]:
    """(factor, letter) of each of a ``Place``'s dimensions: "3D V" is [(3, "D"), (1, "V")]."""
    return [(int(dim[:-1] or 1), dim[-1]) for dim in dims.split()]


def listed(leaves: Iterable[tuple], *path: str) -> int:
    """How many modules "0", "1", ... the leaves have at a path; KeyError if there are none."""
    size = len(path)
    found = {leaf[size] for leaf in leaves if leaf[:size] == path and len(leaf) > size}
    if not found:
        raise KeyError(".".join(path))
    return len(found)


def stacked_shapes(layout: Layout) -> dict[tuple, tuple[int, ...]]:
    """Leaf -> shape of its stacked axes."""
    shapes: dict[tuple, tuple[int, ...]] = {}
    for place in layout.values():
        before = shapes.get(place.path, (0,) * len(place.at))
        shapes[place.path] = tuple(
            max(size, at + 1) for size, at in zip(before, place.at, strict=True)
        )
    return shapes
