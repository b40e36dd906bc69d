"""One step of training as a pure function of the state: gradients in parts, the optimiser, the running average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax.train.objectives import Loss
from specjax.train.optimise import Optimiser

PRECISIONS = ("float32", "bfloat16")


def step(loss: Loss, optimiser: Optimiser, accumulate: int, ema: float) -> Callable:
    """One step, to be compiled: (state, target_params, batch, key) -> (state, what was measured, each f32[]).

    The batch is taken in ``accumulate`` parts of as many rows; gradient and metrics are averaged by the metric "weight".
    """
    objective = jax.value_and_grad(loss, has_aux=True)

    def gradient(params, target_params, batch, key):
        (value, metrics), grads = objective(params, target_params, batch, key)
        return grads, {"loss": value, **metrics}

    def in_parts(params, target_params, batch, key):
        # Every n-th row: then each part lies on all the devices, as the batch does.
        parts = jax.tree.map(
            lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )
        first = jax.tree.map(lambda x: x[0], parts)
        like = jax.eval_shape(gradient, params, target_params, first, key)
        weighed = "weight" in like[1]

        def add(total, part):
            grads, measured = gradient(
                params, target_params, part[0], jax.random.fold_in(key, part[1])
            )
            weight = jnp.float32(measured.pop("weight", 1.0))
            return jax.tree.map(
                lambda so_far, x: so_far + weight * x, total, (grads, measured, 1.0)
            ), None

        like[1].pop("weight", None)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), like
        )
        total, _ = jax.lax.scan(add, (*zeros, jnp.float32(0)), (parts, jnp.arange(accumulate)))
        weight = total[2]
        grads, measured = jax.tree.map(lambda x: x / jnp.where(weight > 0, weight, 1), total[:2])
        return grads, measured | ({"weight": weight} if weighed else {})

    def update(state, target_params, batch, key):
        key = jax.random.fold_in(key, state["step"])
        grads, measured = (in_parts if accumulate > 1 else gradient)(
            state["params"], target_params, batch, key
        )
        updates, opt_state = optimiser.transform.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        after = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        if ema:
            after["ema"] = jax.tree.map(
                lambda old, new: ema * old + (1 - ema) * new, state["ema"], params
            )
        return after, {**measured, "grad_norm": optax.tree.norm(grads)}

    return update


def fresh(params: Any, optimiser: Optimiser, ema: float) -> dict[str, Any]:
    """The state to begin with. A copy: the step donates its state, and the caller keeps what it passed in."""
    params = jax.tree.map(
        lambda leaf: jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32)), params
    )
    state = {"params": params, "opt_state": optimiser.transform.init(params), "step": jnp.int32(0)}
    return state | ({"ema": jax.tree.map(jnp.zeros_like, params)} if ema else {})


def averaged(state: dict[str, Any], ema: float = 0.0) -> Any:
    """The parameters that are evaluated and returned: the last ones, or their average, as Adam corrects it for its start."""
    if not ema:
        return state["params"]
    return jax.tree.map(lambda leaf: leaf / (1 - ema ** state["step"]), state["ema"])


def cast(params: Any, precision: str) -> Any:
    """The parameters with their floating leaves in this precision."""
    if precision == "float32":
        return params
    return jax.tree.map(
        lambda x: x.astype(precision) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )


def in_precision(function: Callable, precision: str) -> Callable:
    """``function`` of (params, target_params, batch, key), seeing parameters of this dtype."""
    if precision == "float32":
        return function
    return lambda params, target_params, *rest: function(
        cast(params, precision), cast(target_params, precision), *rest
    )
