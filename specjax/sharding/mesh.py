"""Meshes of devices, from a text such as "data:4,tensor:2"."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from specjax.errors import UserError

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
_TYPES = (AxisType.Auto,) * len(AXES)
_FORM = "it must be axes with their sizes, such as 'data:4,tensor:2'"


def parse(text: str) -> dict[str, int]:
    """Axis -> size, for every axis of ``AXES``; one size may be -1, the devices that are left.

    Raises UserError for another form, another axis, or an axis twice.
    """
    sizes: dict[str, int] = {}
    for part in str(text).split(","):
        axis, colon, size = (piece.strip() for piece in part.partition(":"))
        if axis not in AXES or not colon:
            raise UserError(f"mesh is {text!r}; {_FORM}, with the axes {', '.join(AXES)}")
        if axis in sizes:
            raise UserError(f"mesh is {text!r} and has the axis {axis} twice; give it once")
        try:
            sizes[axis] = int(size)
        except ValueError:
            sizes[axis] = 0
        if sizes[axis] < 1 and sizes[axis] != -1:
            raise UserError(
                f"mesh is {text!r}; the size of {axis} must be a whole number >= 1, "
                "or -1 for the devices that are left"
            )
    if list(sizes.values()).count(-1) > 1:
        raise UserError(f"mesh is {text!r}; only one size can be -1")
    return {axis: sizes.get(axis, 1) for axis in AXES}


def make_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a text (see ``parse``), with all of ``AXES``.

    ``devices`` (jax.Device) are all of JAX's by default; a smaller mesh takes the first ones. With
    several processes a mesh has all devices. Raises UserError for a mesh that does not fit them.
    """
    sizes, every = parse(text), list(jax.devices() if devices is None else devices)
    known = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if len(every) % known:
            raise UserError(
                f"mesh is {text!r}, and {len(every)} devices cannot be divided by {known}; "
                f"take sizes whose product divides {len(every)}"
            )
        sizes = {axis: len(every) // known if n == -1 else n for axis, n in sizes.items()}
    total = math.prod(sizes.values())
    if total > len(every):
        raise UserError(
            f"mesh is {text!r} and needs {total} devices, and there are {len(every)}; "
            f"take sizes whose product is at most {len(every)}"
        )
    if total < len(every) and jax.process_count() > 1:
        raise UserError(
            f"mesh is {text!r} and has {total} devices, and the {jax.process_count()} processes "
            f"have {len(every)}; take sizes whose product is {len(every)}"
        )
    shape = tuple(sizes[axis] for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=_TYPES, devices=every[:total])


@functools.lru_cache(maxsize=64)
def with_all_axes(mesh: Mesh) -> Mesh:
    """The mesh with all of ``AXES``; those that it lacks have size 1. XLA divides what is on it.

    Raises UserError for another axis.
    """
    if unknown := [axis for axis in mesh.axis_names if axis not in AXES]:
        raise UserError(
            f"the mesh has the axis {unknown[0]!r}; the axes are {', '.join(AXES)}, each of them "
            "may be left out"
        )
    order = [mesh.axis_names.index(axis) for axis in AXES if axis in mesh.axis_names]
    shape = [mesh.shape.get(axis, 1) for axis in AXES]
    return Mesh(mesh.devices.transpose(order).reshape(shape), AXES, axis_types=_TYPES)
