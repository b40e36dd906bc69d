"""One training step as a pure function of the state: gradient, optimiser, running average."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core
from jax.interpreters import partial_eval

from specjax.train.evaluate import Evaluate, evaluator
from specjax.train.objectives import Loss
from specjax.train.optimise import Optimiser
from specjax.train.placement import Placement
from specjax.train.settings import Settings
from specjax.types import Batch


def step(loss: Loss, optimiser: Optimiser, accumulate: int, ema: float) -> Callable:
    """One step, to be compiled: (state, target_params, batch, key) -> (state, metrics).

    The batch is divided into ``accumulate`` parts of equal size; gradients and metrics are those of
    the whole batch: every part counts by its number of labels, for each term of the loss (see
    ``objectives``).
    """
    gradient = _in_parts(loss, accumulate) if accumulate > 1 else _gradient(loss)

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


def _in_parts(loss: Loss, accumulate: int) -> Callable:
    """``_gradient`` of the whole batch, computed in ``accumulate`` parts of it."""
    share = jax.value_and_grad(functools.partial(_share, loss), has_aux=True)

    def in_parts(params, target_params, batch, key):
        # Every n-th row: each part is spread over all devices, as the batch is.
        parts = jax.tree.map(
            lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(accumulate))
        whole = whole_weights(loss, params, target_params, parts, keys)

        def add(total, part):
            (_, metrics), grads = share(params, target_params, *part, whole)
            return jax.tree.map(jnp.add, total, (grads, metrics)), None

        first = jax.tree.map(lambda x: x[0], (parts, keys))
        (_, metrics), grads = jax.eval_shape(share, params, target_params, *first, whole)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), (grads, metrics)
        )
        (grads, metrics), _ = jax.lax.scan(add, zeros, (parts, keys))
        return grads, metrics

    return in_parts


def whole_weights(loss: Loss, params, target_params, parts: Batch, keys: jax.Array) -> Any:
    """``_weights`` of a whole batch; ``parts`` and ``keys`` have a leading axis for its parts.

    They must be known before the gradient of the first part. They depend on the labels only: when
    this is compiled, everything else is removed from the loop, the models included.
    """
    each = jax.lax.map(lambda part: _weights(loss(params, target_params, *part)[1]), (parts, keys))
    return jax.tree.map(lambda x: x.sum(0), each)


def _weights(metrics: dict) -> Any:
    """The metric "weight": f32[], or one for each term or the loss and each metric; default 1."""
    return jax.tree.map(jnp.float32, metrics.get("weight", 1.0))


def _share(loss: Loss, params, target_params, batch, key, whole: Any) -> tuple[jax.Array, dict]:
    """What a part of a batch adds to the loss and the metrics ("loss" included) of the whole.

    ``whole``: ``_weights`` of the whole batch.
    """
    value, metrics = loss(params, target_params, batch, key)
    weights = _weights(metrics)
    shares = jax.tree.map(lambda part, all_: part / jnp.where(all_ > 0, all_, 1), weights, whole)

    def scaled(name: str, values: Any) -> Any:
        if name == "terms":
            return {term: scaled(term, x) for term, x in values.items()}
        return values * (shares[name] if isinstance(shares, dict) else shares)

    added = {name: scaled(name, x) for name, x in metrics.items() if name != "weight"}
    if "terms" in added:
        value = functools.reduce(jnp.add, added["terms"].values())
    else:
        value = scaled("loss", value)
    weight = {"weight": weights} if "weight" in metrics else {}
    return value, {"loss": value, **added, **weight}


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
    return lambda params, target_params, *rest: function(
        cast(params, precision), cast(target_params, precision), *rest
    )


def product_operations(jaxpr: Any) -> int:
    """Operations of all matrix products of a program: a multiplication and an addition are two.

    ``jaxpr``: a ``jax.extend.core.Jaxpr``, or a closed one. What no result needs is left out. A
    loop counts all its turns, a ``while`` (of unknown length) one, a conditional its largest
    branch, and what is computed again in the backward pass counts again.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    total = 0
    for equation in needed.eqns:
        name, values = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = values["dimension_numbers"]
            left: Any = equation.invars[0].aval
            result: Any = equation.outvars[0].aval
            total += 2 * math.prod(left.shape[axis] for axis in contracted) * result.size
            continue
        inner = [product_operations(each) for each in core.jaxprs_in_params(values)]
        if name == "shard_map":  # its shapes are those of one device
            mesh, axes = values["mesh"], values["newly_manual_axes"]
            total += sum(inner) * math.prod(mesh.shape[axis] for axis in axes)
        elif name == "cond":
            total += max(inner)
        else:
            total += sum(inner) * (values["length"] if name == "scan" else 1)
    return total


# (params, target_params, batch, key) -> the batch to train on instead.
Rewrite = Callable[[Any, Any, Batch, jax.Array], Batch]


class Programs(NamedTuple):
    """The functions of a step, compiled; and the learning rate."""

    rewrite: Rewrite | None
    advance: jax.stages.Wrapped  # (state, ...) -> (state, metrics); donates the state
    averaged: Callable[[Any], Any]  # state -> the parameters that are evaluated and returned
    evaluate: Evaluate
    rate: Callable[[int], Any]


def compile_programs(
    loss: Loss,
    held_out_loss: Loss | None,
    rewrite: Rewrite | None,
    optimiser: Optimiser,
    settings: Settings,
    placement: Placement,
    stored: dict[str, Any],
) -> Programs:
    """The programs of a run; they are compiled at their first call.

    ``held_out_loss`` is evaluated; None: ``loss``. ``stored`` has the shardings of the state.
    """

    def placed(function: Callable) -> Callable:
        # Cast first: parameters are gathered in the precision in which they are used.
        return in_precision(placement.gathering(function), settings.precision)

    if rewrite is not None:
        rewrite = jax.jit(placed(rewrite), out_shardings=placement.rows)
    advance = step(placed(loss), optimiser, settings.accumulate, settings.ema)
    advance = jax.jit(advance, donate_argnums=0, out_shardings=(stored, placement.everywhere))
    kept = averaged
    if settings.ema:
        average = functools.partial(averaged, ema=settings.ema)
        kept = jax.jit(average, out_shardings=stored["params"])
    evaluate = evaluator(placed(held_out_loss or loss), placement.batch, placement.everywhere)
    return Programs(rewrite, advance, kept, evaluate, optimiser.schedule)
