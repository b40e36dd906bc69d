"""What turns gradients into updates: optimisers, schedules, clipping, a rate for a joint target."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from specjax import checks
from specjax.errors import UserError

NAMES = ("adamw", "muon", "sgd", "lion")
SCHEDULES = ("cosine", "linear", "constant", "rsqrt")
_BETAS = {"adamw": (0.9, 0.95), "muon": (0.9, 0.95), "sgd": (0.9, None), "lion": (0.9, 0.99)}


class Optimiser(NamedTuple):
    """A gradient transformation, and the learning rate that it uses (for the log)."""

    transform: optax.GradientTransformation
    schedule: Callable[[Any], Any]  # step -> learning rate


def optimiser(
    name: str,
    *,
    steps: int,
    learning_rate: float,
    adam_learning_rate: float | None = None,
    schedule: str = "cosine",
    warmup: float = 0.05,
    final: float = 0.1,
    weight_decay: float = 0.01,
    clip: float = 1.0,
    clip_value: float = 0.0,
    b1: float | None = None,
    b2: float | None = None,
    eps: float | None = None,
    target_rate: float = 1.0,
    target_from: int = 0,
) -> Optimiser:
    """An optimiser with warm-up, a schedule, and clipped gradients.

    Args:
        name: "adamw", "muon", "sgd" or "lion". Muon (Jordan 2024,
            kellerjordan.github.io/posts/muon) updates the matrices inside the layers, and AdamW the
            embeddings, the head and the vectors.
        steps: of the run.
        learning_rate: the peak.
        adam_learning_rate: of muon's AdamW part; None = ``learning_rate``.
        schedule: "cosine", "linear" (both end at ``final``), "constant" or "rsqrt" (inverse square
            root); each begins with a linear warm-up.
        warmup: a fraction of the steps.
        final: a fraction of the learning rate.
        weight_decay: not applied to norm scales and biases.
        clip: largest global norm of the gradients, after ``clip_value``; 0 = no clipping.
        clip_value: largest absolute value of a gradient; 0 = no clipping.
        b1: momentum; None = usual for the optimiser.
        b2: average of squares (lion: the momentum that is kept); None = usual for the optimiser.
        eps: guards the division; None = 1e-8.
        target_rate: factor on the learning rate of ``params["target"]``, if a target is trained
            together with ``params["draft"]`` (Cai et al. 2024, arXiv:2401.10774, section 2.2.2).
        target_from: step at which the target starts to change, and its optimiser state starts.

    Raises UserError for invalid values.
    """
    values = {
        key: value for key, value in locals().items() if key not in ("name", "steps", "schedule")
    }
    _check(name, schedule, values)
    rate = functools.partial(
        _schedule, schedule, steps=steps, warmup=int(warmup * steps), final=final
    )
    main, adam = rate(learning_rate), rate(adam_learning_rate or learning_rate)
    make = functools.partial(_transform, name, weight_decay=weight_decay, b1=b1, b2=b2, eps=eps)
    transform = make(main, adam)
    if target_rate != 1 or target_from:
        late = make(*(_late(schedule, target_rate, target_from) for schedule in (main, adam)))
        transform = _with_target(transform, late, target_from)
    return Optimiser(optax.chain(*_clipping(clip, clip_value, target_from), transform), main)


def _check(name: str, schedule: str, values: dict[str, float | None]) -> None:
    checks.one_of("config.optimiser.name", name, NAMES)
    checks.one_of("config.optimiser.schedule", schedule, SCHEDULES)
    if name == "sgd" and values["b2"] is not None:
        raise UserError("config.optimiser.b2 is given, but sgd averages no squares; leave it out")
    if name in ("sgd", "lion") and values["eps"] is not None:
        raise UserError(f"config.optimiser.eps is given, but {name} does not divide; leave it out")
    for key, value in values.items():
        if value is None:
            continue
        where = f"config.optimiser.{key}"
        if key in ("learning_rate", "adam_learning_rate"):
            checks.number(where, value, "> 0", lambda x: x > 0)
        elif key in ("warmup", "b1", "b2"):
            checks.number(where, value, "in [0, 1)", lambda x: 0 <= x < 1)
        else:
            checks.number(where, value, ">= 0", lambda x: x >= 0)


def _schedule(name: str, peak: float, *, steps: int, warmup: int, final: float) -> optax.Schedule:
    if name == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, final * peak)
    if name == "linear":
        after = optax.linear_schedule(peak, final * peak, steps - warmup)
    elif name == "constant":
        after = optax.constant_schedule(peak)
    else:
        after = functools.partial(_inverse_root, peak, warmup)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def _inverse_root(peak: float, warmup: int, step: Any) -> Any:
    """``step`` counts from the end of the warm-up; at twice its length the rate is peak/sqrt(2)."""
    return peak * (1 + jnp.maximum(step, 0) / max(warmup, 1)) ** -0.5


def _transform(
    name: str,
    rate: optax.Schedule,
    adam_rate: optax.Schedule,
    *,
    weight_decay: float,
    b1: float | None,
    b2: float | None,
    eps: float | None,
) -> optax.GradientTransformation:
    b1 = _BETAS[name][0] if b1 is None else b1
    b2 = _BETAS[name][1] if b2 is None else b2
    eps = 1e-8 if eps is None else eps
    if name == "adamw":
        return optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_decayed)
    if name == "lion":
        return optax.lion(rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=_decayed)
    if name == "sgd":
        return optax.chain(
            optax.add_decayed_weights(weight_decay, _decayed), optax.sgd(rate, momentum=b1)
        )
    return optax.contrib.muon(
        rate,
        # Three steps after AOL scaling come close to the usual five, and a step is a third of the
        # cost here.
        ns_steps=3,
        preconditioning="aol",
        beta=b1,  # 0.95 is for longer runs
        eps=eps,
        weight_decay=weight_decay,
        adam_b1=b1,
        adam_b2=b2,
        adam_learning_rate=adam_rate,
        muon_weight_dimension_numbers=_hidden_matrices,
    )


def _late(schedule: optax.Schedule, target_rate: float, target_from: int) -> optax.Schedule:
    """The schedule of a target whose own count of steps starts at step ``target_from``."""
    return lambda step: target_rate * schedule(step + target_from)


def _with_target(
    draft: optax.GradientTransformation, target: optax.GradientTransformation, target_from: int
) -> optax.GradientTransformation:
    """``draft`` for params["draft"]; ``target`` for params["target"], from that step on.

    The target's state (Adam's moments) starts at that step.
    """
    late = optax.transforms.conditionally_mask(target, functools.partial(_begun, target_from))
    return optax.partition({"target": late, "draft": draft}, _parts)


def _clipping(clip: float, clip_value: float, target_from: int) -> list:
    """The transformations before the optimiser, in the order in which they apply."""
    chain = []
    if target_from:  # a target that is not trained yet is not counted in the norm either
        gate = optax.scale_by_schedule(lambda step: jnp.where(_begun(target_from, step), 1.0, 0.0))
        chain.append(optax.masked(gate, _is_target))
    if clip_value:
        chain.append(optax.clip(clip_value))
    if clip:
        chain.append(optax.clip_by_global_norm(clip))
    return chain


def _begun(target_from: int, step: Any, **_: Any) -> jax.Array:
    return jnp.asarray(step) >= target_from


def _is_target(params: Any) -> Any:
    return jax.tree.map(lambda part: part == "target", _parts(params))


def _parts(params: Any) -> Any:
    """ "target" or "draft" for each leaf."""
    if not isinstance(params, dict) or "target" not in params:
        raise UserError(
            "config.optimiser.target_rate and target_from are for objectives that train the target "
            "together with its heads; leave them 1.0 and 0"
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "target" if path[0].key == "target" else "draft", params
    )


def _decayed(params: Any) -> Any:
    """All leaves except norm scales and biases, which have two dimensions if heads are stacked."""

    def decayed(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return leaf.ndim > 1 and name not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(decayed, params)


def _hidden_matrices(params: Any) -> Any:
    """Muon's dimension numbers for the matrices inside the layers, None for other leaves."""

    def spec(path, leaf):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        names = names[1:] if names[0] in ("target", "draft") else names
        matrix = leaf.ndim >= 2 and names[-1] in ("kernel", "proj", "proj_in")
        if not matrix or names[0] == "head":
            return None
        # The last two dimensions: heads are stacked in those before.
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(spec, params)
