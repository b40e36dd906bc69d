"""One training step as a pure function of the state: gradient, optimiser, running average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax.train.objectives import Loss
from specjax.train.optimise import Optimiser


def step(loss: Loss, optimiser: Optimiser, accumulate: int, ema: float) -> Callable:
    """One step, to be compiled: (state, target_params, batch, key) -> (state, metrics, each f32[]).

    The batch is divided into ``accumulate`` parts of equal size; gradients and metrics are averaged
    with the metric "weight" as weight.
    """
    gradient = _gradient(loss)
    if accumulate > 1:
        gradient = _in_parts(gradient, accumulate)

    def update(state, target_params, batch, key):
        key = jax.random.fold_in(key, state["step"])
        grads, metrics = gradient(state["params"], target_params, batch, key)
        updates, opt_state = optimiser.transform.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        after = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        if ema:
            after["ema"] = jax.tree.map(
                lambda old, new: ema * old + (1 - ema) * new, state["ema"], params
            )
        return after, {**metrics, "grad_norm": optax.tree.norm(grads)}

    return update


def _gradient(loss: Loss) -> Callable:
    """A function (params, target_params, batch, key) -> (gradients, metrics, "loss" included)."""
    objective = jax.value_and_grad(loss, has_aux=True)

    def gradient(params, target_params, batch, key):
        (value, metrics), grads = objective(params, target_params, batch, key)
        return grads, {"loss": value, **metrics}

    return gradient


def _in_parts(gradient: Callable, accumulate: int) -> Callable:
    """``gradient`` computed in ``accumulate`` parts of the batch, averaged by their weights."""

    def in_parts(params, target_params, batch, key):
        # Every n-th row: each part is spread over all devices, as the batch is.
        parts = jax.tree.map(
            lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )
        first = jax.tree.map(lambda x: x[0], parts)
        like = jax.eval_shape(gradient, params, target_params, first, key)
        weighted = "weight" in like[1]

        def add(total, part):
            grads, metrics = gradient(
                params, target_params, part[0], jax.random.fold_in(key, part[1])
            )
            weight = jnp.float32(metrics.pop("weight", 1.0))
            return jax.tree.map(
                lambda so_far, x: so_far + weight * x, total, (grads, metrics, 1.0)
            ), None

        like[1].pop("weight", None)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), like
        )
        total, _ = jax.lax.scan(add, (*zeros, jnp.float32(0)), (parts, jnp.arange(accumulate)))
        weight = total[2]
        grads, metrics = jax.tree.map(lambda x: x / jnp.where(weight > 0, weight, 1), total[:2])
        return grads, metrics | ({"weight": weight} if weighted else {})

    return in_parts


def fresh(params: Any, optimiser: Optimiser, ema: float) -> dict[str, Any]:
    """The initial state: "params", "opt_state", "step" i32[], and "ema" if there is an average.

    Parameters are copied (to float32 at least): a step donates its state, and the caller keeps what
    it passed in.
    """
    params = jax.tree.map(
        lambda leaf: jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32)), params
    )
    state = {"params": params, "opt_state": optimiser.transform.init(params), "step": jnp.int32(0)}
    return state | ({"ema": jax.tree.map(jnp.zeros_like, params)} if ema else {})


def averaged(state: dict[str, Any], ema: float = 0.0) -> Any:
    """The parameters that are evaluated and returned: the last ones, or their average.

    The average starts at zero; this bias is corrected as in Adam.
    """
    if not ema:
        return state["params"]
    return jax.tree.map(lambda leaf: leaf / (1 - ema ** state["step"]), state["ema"])


def cast(params: Any, precision: str) -> Any:
    """The parameters with floating-point leaves in this precision; "float32" changes nothing."""
    if precision == "float32":
        return params
    return jax.tree.map(
        lambda x: x.astype(precision) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )


def in_precision(function: Callable, precision: str) -> Callable:
    """``function`` of (params, target_params, batch, key), with both parameters cast."""
    if precision == "float32":
        return function
    return lambda params, target_params, *rest: function(
        cast(params, precision), cast(target_params, precision), *rest
    )
