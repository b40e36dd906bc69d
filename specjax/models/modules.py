"""Flax modules as functions of their parameters, a plain nested dict."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.types import Params


class Module(NamedTuple):
    """Modules of a kind. They differ in their shape, a static value."""

    make: Callable[[Any, Any, nnx.Rngs], Any]  # (shape, dtype, rngs) -> nnx.Module

    def leaves(self, shape: Any, dtype: Any = jnp.float32) -> Params:
        """The shapes of the parameters, a plain dict of ``jax.ShapeDtypeStruct``."""
        return nnx.to_pure_dict(_abstract(self.make, shape, jnp.dtype(dtype))[1])

    def new(self, shape: Any, key: jax.Array, dtype: Any = jnp.float32) -> Params:
        """Random parameters (normal, standard deviation 0.02)."""
        return nnx.to_pure_dict(nnx.state(self.make(shape, dtype, nnx.Rngs(key))))

    def merge(self, shape: Any, params: Params, dtype: Any = None) -> Any:
        """The module with these parameters (inside a traced function, free at run time).

        Subtrees of ``params`` that it does not have are left out. ``dtype`` is that of activations
        (``at_least``); None: that of the parameters.
        """
        graph, state = _abstract(self.make, shape, at_least(dtype, params))
        # A copy: tracers must not be written into the cached state.
        state = jax.tree.map(lambda x: x, state)
        own = {name: value for name, value in params.items() if name in state}
        nnx.replace_by_pure_dict(state, own)
        return nnx.merge(graph, state)


@functools.cache
def _abstract(make: Callable[..., Any], shape: Any, dtype: Any) -> tuple[Any, Any]:
    """(graph, state) of the module, without arrays."""
    return nnx.split(nnx.eval_shape(lambda: make(shape, dtype, nnx.Rngs(0))))


def at_least(dtype: Any, params: Params) -> Any:
    """``dtype``, or float64 for parameters of float64 (exactness tests); None: their own."""
    leaves = jax.tree.leaves(params)  # none: parameters that must not be read
    stored = leaves[0].dtype if leaves else jnp.dtype(jnp.float32)
    return jnp.dtype(stored if dtype is None or stored == jnp.float64 else dtype)


def dtype_of(params: Params) -> Any:
    """The dtype of a network with these parameters; float32 for None, a new one."""
    return jnp.dtype(jnp.float32 if params is None else jax.tree.leaves(params)[0].dtype)
