"""Where the arrays of a training run are stored: on the devices of a mesh.

The rows of a batch are divided among the axes "data" and "fsdp". Parameters, their average and the
optimiser's moments are divided by the rules of ``specjax.sharding``: among "tensor" by the table,
among "fsdp" by the largest other dimension. A parameter divided by "fsdp" is gathered where it is
used, and its gradient divided (Rajbhandari et al. 2020, 1910.02054, section 5). This is stated
explicitly (``Placement.gathering``): otherwise XLA divides the columns of activations as those of
the embedding, and exchanges the activations of the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import sharding
from specjax.errors import UserError
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.sharding import DATA, FSDP, TENSOR
from specjax.types import Batch


class Source(Protocol):
    """Where batches come from: a pure function of the step (counted from 0)."""

    def batch(self, step: int) -> Batch: ...  # of NumPy arrays


@runtime_checkable
class Divided(Source, Protocol):
    """A source that can read some rows of a batch: what takes time to read."""

    @property
    def batch_size(self) -> int: ...

    def part(self, step: int, rows: Sequence[int]) -> Batch: ...


class Placement(NamedTuple):
    """A mesh, and what is stored where."""

    mesh: Mesh

    @property
    def everywhere(self) -> NamedSharding:
        """A copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """The rows divided among the devices."""
        return NamedSharding(self.mesh, PartitionSpec((DATA, FSDP)))

    @property
    def parts(self) -> int:
        """The number of parts of the rows."""
        return self.mesh.shape[DATA] * self.mesh.shape[FSDP]

    @property
    def divides(self) -> bool:
        """Whether parameters are divided."""
        return self.mesh.shape[FSDP] * self.mesh.shape[TENSOR] > 1

    @property
    def spread(self) -> bool:
        """Whether no device of this process has all parameters, or other processes have them too.

        Then parameters stay on the mesh when a run is measured and stored.
        """
        return self.divides or not self.everywhere.is_fully_addressable

    @property
    def first(self) -> Any:
        """The first device, a ``jax.Device``."""
        return self.mesh.devices.flat[0]

    def params(self, params: Any, fsdp: bool = True) -> Any:
        """The sharding of every parameter; arrays or ``jax.ShapeDtypeStruct``.

        ``fsdp``: whether "fsdp" divides them too.
        """
        specs = sharding.param_specs(params, dict(self.mesh.shape), fsdp=fsdp)
        return sharding.shardings(self.mesh, specs)

    def state(self, state: dict[str, Any]) -> Any:
        """The sharding of every array of a state (see ``update.fresh``).

        An array of the optimiser or of the average that has the shape of a parameter, and its path
        at the end of its own, is divided like that parameter. Others are whole.
        """
        leaves = jax.tree_util.tree_flatten_with_path(state["params"])[0]
        stored = jax.tree.leaves(self.params(state["params"]))
        known = {
            (*_names(path), leaf.shape): where
            for (path, leaf), where in zip(leaves, stored, strict=True)
        }

        def one(path, leaf) -> NamedSharding:
            names = _names(path)
            ends = ((*names[start:], leaf.shape) for start in range(len(names)))
            return next((known[end] for end in ends if end in known), self.everywhere)

        return jax.tree_util.tree_map_with_path(one, state)

    def like(self, state: dict[str, Any]) -> Any:
        """``jax.ShapeDtypeStruct`` of every array of a state, with its sharding."""

        def one(leaf: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree.map(one, state, self.state(state))

    def begin(self, begin: Callable, params: Any) -> Any:
        """The initial state ``begin(params)``; divided parts are made where they are stored."""
        stored = self.state(jax.eval_shape(begin, params))
        if not self.divides:
            return self.put(begin(params), stored)
        return jax.jit(begin, out_shardings=stored)(self.put(params, stored["params"]))

    def put(self, values: Any, shardings: Any) -> Any:
        """Arrays on the devices; with several processes every one has them all on the host."""
        return jax.tree.map(sharding.put_leaf, values, shardings)

    def put_params(self, params: Any) -> Any:
        """Parameters on the devices."""
        return self.put(params, self.params(params))

    def make(self, function: Callable, *args: Any) -> Any:
        """The parameters that a function returns, made where they are stored."""
        if not self.divides:
            return function(*args)
        shardings = self.params(jax.eval_shape(function, *args))
        return jax.jit(function, out_shardings=shardings)(*args)

    def gathering(self, function: Callable) -> Callable:
        """``function`` of (params, target_params, ...), with both gathered along "fsdp" inside it.

        Gradients are divided as the parameters.
        """
        if self.mesh.shape[FSDP] == 1:
            return function

        def whole(params: Any) -> Any:
            where = self.params(params, fsdp=False)
            return jax.tree_util.tree_map_with_path(_gather, params, self.params(params), where)

        def gathered(params, target_params, *rest):
            return function(whole(params), whole(target_params), *rest)

        return gathered

    def batch(self, batch: Batch) -> Batch:
        """A batch on the devices: divided if its rows can be divided.

        Each process stores the rows of its own devices only.
        """
        where = self.everywhere if len(batch.tokens) % self.parts else self.rows
        return jax.tree.map(lambda leaf: sharding.put_leaf(leaf, where), batch)

    def fetch(self, source: Source, step: int) -> Batch:
        """The batch of a step, on the devices.

        With several processes, a ``Divided`` source reads the rows of this process's devices only.
        """
        size = source.batch_size if isinstance(source, Divided) else 0
        if self.rows.is_fully_addressable or not size or size % self.parts:
            return self.batch(_numbered(source.batch(step), step))
        assert isinstance(source, Divided)
        held = self.rows.addressable_devices_indices_map((size,)).values()
        own = np.unique([row for index in held if index for row in range(size)[index[0]]])

        def one(leaf: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                return leaf[np.searchsorted(own, range(size)[index[0]])]

            return jax.make_array_from_callback((size, *leaf.shape[1:]), self.rows, part)

        return jax.tree.map(one, _numbered(source.part(step, own.tolist()), step))

    def check_decoder(self, name: str, shape: TransformerConfig) -> None:
        """Raises UserError for a decoder whose layers cannot be divided among "tensor"."""
        size = self.mesh.shape[TENSOR]
        for count, what in ((shape.num_heads, "heads"), (shape.num_kv_heads, "key/value heads")):
            if count % size:
                raise UserError(
                    f"config.mesh divides matrices among {TENSOR}:{size}, and {name} has {count} "
                    f"{what}; take a divisor of {count}"
                )
        sharding.param_specs(lm.abstract_params(shape), dict(self.mesh.shape), strict=True)


def place(mesh: str = "", devices: Sequence[Any] | None = None) -> Placement:
    """The placement on a mesh such as "data:2,fsdp:4"; "" divides rows among all devices.

    ``devices`` (jax.Device) are all of JAX's by default. Raises UserError.
    """
    return Placement(sharding.make_mesh(mesh or f"{DATA}:-1", devices))


def _numbered(batch: Batch, step: int) -> Batch:
    """The batch with ``Batch.step``."""
    return batch.replace(step=np.full(len(batch.tokens), step, np.int32))


def _gather(path: tuple, value: Any, before: NamedSharding, after: NamedSharding) -> Any:
    # The gradient of a table is a scatter of rows: with divided columns XLA would exchange the
    # gradients of all activations.
    table = _names(path)[-1] in ("embedding", "emb")
    return _moved(value, after if table else before, after)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(value: jax.Array, before: NamedSharding, after: NamedSharding) -> jax.Array:
    """A parameter moved to the sharding ``after``; its gradient has the sharding ``before``."""
    return jax.lax.with_sharding_constraint(value, after)


def _moved_forward(value, before, after):
    return _moved(value, before, after), None


def _moved_backward(before, after, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, before),)


_moved.defvjp(_moved_forward, _moved_backward)


def _names(path: tuple) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
