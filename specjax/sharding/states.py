"""Which dimension of an array of a decode state has the rows, and which the heads of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.cache import KVCache, RecurrentState
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
    why = "rows of such a drafter cannot be divided among devices"
    axes, state = row_axes(drafter, make, params, arrays, why)
    rows = [PartitionSpec() if at is None else PartitionSpec(*[None] * at, DATA) for at in axes]
    by_rows = jax.tree.unflatten(jax.tree.structure(state), rows)
    leaves, treedef = jax.tree.flatten(_divide_caches(by_rows, state, mesh.shape[TENSOR]))
    return Specs(tuple(leaves), treedef)


def row_axes(
    drafter: Drafter, make: Callable, params: Any, arrays: tuple, why: str
) -> tuple[tuple[int | None, ...], Any]:
    """The axis of each leaf of ``make(params, *arrays)`` that has the rows, and the leaves' shapes.

    None: the number of the round, which belongs to no row. Raises UserError for any other such
    array of the drafter; ``why`` is what cannot be done then.
    """
    one, two = (jax.eval_shape(make, params, *_with_rows(arrays, rows)) for rows in (1, 2))
    axes = []
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(two), strict=True):
        at = [n for n, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name != "round" and len(at) != 1:
            raise UserError(
                f"{drafter.name} keeps {name} of shape {a.shape}, which belongs to no row of the "
                f"batch; {why}"
            )
        axes.append(None if name == "round" else at[0])
    return tuple(axes), one


def abstract(values: Any) -> tuple[tuple, Any]:
    """Shapes and dtypes of a pytree, and its structure; both can be hashed."""
    leaves, treedef = jax.tree.flatten(values)
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves), treedef


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
        if isinstance(value, RecurrentState) and value.memory.shape[1] % size == 0:
            return spec.replace(memory=PartitionSpec(DATA, TENSOR))
        if not isinstance(value, KVCache) or any(x.shape[1] % size for x in value.k):
            return spec
        heads = (PartitionSpec(DATA, TENSOR),) * len(value.k)
        return spec.replace(k=heads, v=heads)

    whole = (KVCache, RecurrentState)
    return jax.tree.map(one, by_rows, state, is_leaf=lambda x: isinstance(x, whole))
