"""Which dimension of an array of a decode state has the rows, and which the heads of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.cache import KVCache
from specjax.errors import UserError
from specjax.sharding.mesh import DATA, TENSOR
from specjax.types import DecodeState, Drafter


class Specs(NamedTuple):
    """The ``PartitionSpec`` of each leaf of a state; it can be hashed."""

    leaves: tuple[PartitionSpec, ...]
    treedef: Any

    @property
    def whole(self) -> Any:
        """A pytree as the state."""
        return jax.tree.unflatten(self.treedef, self.leaves)

    @property
    def rows(self) -> Any:
        """The same with the division of the rows only."""
        rows = [PartitionSpec(*(a if a == DATA else None for a in spec)) for spec in self.leaves]
        return jax.tree.unflatten(self.treedef, rows)


def specs(mesh: Mesh, drafter: Drafter, make: Callable, params: Any, arrays: tuple) -> Specs:
    """The specs of the state ``make(params, *arrays)``; arrays [B,...] of any number of rows.

    Raises UserError for a drafter with an array that belongs to no row: its parts would differ.
    """
    one = jax.eval_shape(make, params, *_with_rows(arrays, 1))
    two = jax.eval_shape(make, params, *_with_rows(arrays, 2))

    def spec(path: tuple, a: Any, b: Any) -> PartitionSpec:
        sizes = zip(a.shape, b.shape, strict=True)
        at = [number for number, (x, y) in enumerate(sizes) if x != y]
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name == "round":
            return PartitionSpec()
        if len(at) != 1:
            raise UserError(
                f"{drafter.name} keeps {name} of shape {a.shape}, which belongs to no row of the "
                "batch; rows of such a drafter cannot be divided among devices"
            )
        return PartitionSpec(*[None] * at[0], DATA)

    by_rows = jax.tree_util.tree_map_with_path(spec, one, two)
    divided = _divide_caches(by_rows, one, mesh.shape[TENSOR])
    leaves, treedef = jax.tree.flatten(divided, is_leaf=_is_spec)
    return Specs(tuple(leaves), treedef)


def specs_of(mesh: Mesh, state: DecodeState) -> Specs:
    """The specs of a state on the mesh. Raises UserError if it is elsewhere, or used up."""
    leaves, treedef = jax.tree.flatten(state)
    if any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array)):
        raise UserError(
            "the state was given to an earlier call, which has reused its memory; "
            "go on with the state that it returned"
        )
    found = [getattr(leaf, "sharding", None) for leaf in leaves]
    kept = tuple(s.spec for s in found if isinstance(s, NamedSharding) and s.mesh == mesh)
    if len(kept) < len(leaves):
        raise UserError(
            "the state is not on the devices of this mesh; prefill it with sharding.prefill"
        )
    return Specs(kept, treedef)


def _with_rows(arrays: tuple, rows: int) -> tuple:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), arrays)


def _divide_caches(by_rows: Any, state: Any, size: int) -> Any:
    """The specs with the heads of each cache divided among "tensor", if they can be."""

    def one(spec: Any, value: Any) -> Any:
        if not isinstance(value, KVCache) or any(x.shape[1] % size for x in value.k):
            return spec
        heads = (PartitionSpec(DATA, TENSOR),) * len(value.k)
        return spec.replace(k=heads, v=heads)

    def stop(value: Any) -> bool:
        return isinstance(value, KVCache) or _is_spec(value)

    return jax.tree.map(one, by_rows, state, is_leaf=stop)


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)
