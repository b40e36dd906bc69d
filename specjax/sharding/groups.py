"""Runs one program on a mesh, or one on the devices of each part of the rows.

Arrays of the whole mesh and those of its parts have the same buffers: nothing is copied.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.errors import UserError
from specjax.sharding.mesh import DATA

# Settings of the calling thread that change what is computed.
_CONTEXTS = ("default_matmul_precision", "enable_x64", "debug_nans")


def run(mesh: Mesh, program: Callable[..., Callable], static: tuple, arguments: tuple) -> Any:
    """``program(mesh, *static)(*arguments)``; one program for each part of the rows, if needed.

    It is needed if the mesh divides more than rows. The arguments are arrays on the mesh, or whole
    ones of the host. The parts are dispatched at once: their programs are compiled in parallel.
    """
    if mesh.shape[DATA] in (1, mesh.size):
        return program(mesh, *static)(*arguments)
    parts = [part for part in _parts(mesh) if part.local_devices]
    inputs = [jax.tree.map(functools.partial(_take, part), arguments) for part in parts]
    settings = {name: getattr(jax.config, f"jax_{name}") for name in _CONTEXTS}

    def one(part: Mesh, args: tuple) -> Any:
        # JAX's context managers change the settings of one thread.
        with contextlib.ExitStack() as stack:
            for name, value in settings.items():
                stack.enter_context(getattr(jax, name)(value))
            return program(part, *static)(*args)

    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        started = [pool.submit(one, part, args) for part, args in zip(parts, inputs, strict=True)]
        results = [each.result() for each in started]
    return jax.tree.map(lambda *pieces: _join(mesh, pieces), *results)


@functools.lru_cache(maxsize=16)
def latest(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """The program that gives i32[], the largest of i32[D], one number of each part of the rows."""
    return jax.jit(lambda rounds: rounds.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.lru_cache(maxsize=16)
def _parts(mesh: Mesh) -> tuple[Mesh, ...]:
    """A mesh for each part of the rows, with the same axes."""
    pieces = np.split(mesh.devices, mesh.shape[DATA], axis=mesh.axis_names.index(DATA))
    return tuple(Mesh(piece, mesh.axis_names, axis_types=mesh.axis_types) for piece in pieces)


def _take(part: Mesh, value: jax.Array) -> jax.Array:
    """A part of an array: the pieces on these devices."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return value
    shape = _times(sharding.spec, value.shape, 1 / sharding.mesh.shape[DATA])
    return _array(shape, NamedSharding(part, sharding.spec), [value])


def _join(mesh: Mesh, pieces: tuple[jax.Array, ...]) -> jax.Array:
    """The array of the whole mesh from the parts of this process."""
    spec = pieces[0].sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
    shape = _times(spec, pieces[0].shape, mesh.shape[DATA])
    return _array(shape, NamedSharding(mesh, spec), pieces)


def _array(
    shape: tuple[int, ...], sharding: NamedSharding, pieces: Sequence[jax.Array]
) -> jax.Array:
    """An array with the buffers that ``pieces`` have on its devices, in the order of these."""
    held = {shard.device: shard.data for piece in pieces for shard in piece.addressable_shards}
    buffers = [held[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, buffers)


def _times(spec: PartitionSpec, shape: tuple[int, ...], factor: float) -> tuple[int, ...]:
    """The shape with the dimension of the rows times ``factor``."""
    divided = itertools.zip_longest(shape, spec)
    return tuple(round(size * factor) if axis == DATA else size for size, axis in divided)


def first_part(mesh: Mesh, values: Any) -> tuple[Mesh, Any]:
    """The mesh of the first part of the rows, and the same arrays there.

    With several processes it is the first one on devices of this process. Raises UserError if there
    is none.
    """
    part = next((p for p in _parts(mesh) if len(p.local_devices) == p.size), None)
    if part is None:
        raise UserError(
            "the mesh divides matrices among processes, and the parts of a round are timed and "
            "checked in each process alone; take sizes of fsdp and tensor whose product is at most "
            f"{jax.local_device_count()}, the devices of a process"
        )
    return part, jax.tree.map(functools.partial(_take, part), values)


def fetch(values: Any) -> Any:
    """The arrays of a pytree on the host, whole, in every process."""

    def one(value: Any) -> np.ndarray:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return np.asarray(multihost_utils.process_allgather(value, tiled=True))
        return np.asarray(value)

    return jax.tree.map(one, values)


def slowest(seconds: Sequence[float]) -> list[float]:
    """Each time of the process in which it is the longest; all must call it."""
    if jax.process_count() == 1:
        return list(seconds)
    every = multihost_utils.process_allgather(np.asarray(seconds, np.float32))
    return every.reshape(-1, len(seconds)).max(0).tolist()
