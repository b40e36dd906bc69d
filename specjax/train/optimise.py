"""What turns gradients into updates: optimisers, learning-rate schedules, clipping, and a rate of its own for the target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from specjax.errors import UserError

NAMES = ("adamw", "muon", "sgd", "lion")
SCHEDULES = ("cosine", "linear", "constant", "rsqrt")
_BETAS = {"adamw": (0.9, 0.95), "muon": (0.9, 0.95), "sgd": (0.9, None), "lion": (0.9, 0.99)}


class Optimiser(NamedTuple):
    """A gradient transformation, and the learning rate it uses (for the log)."""

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
    """The optimiser called "adamw", "muon", "sgd" or "lion", with warm-up, a schedule, and clipped gradients.

    ``schedule`` is "cosine", "linear" (both end at ``final``, a fraction of the learning rate), "constant" or "rsqrt"
    (inverse square root); each begins with a linear warm-up, ``warmup`` being a fraction of the steps. Gradients are
    clipped by value at ``clip_value``, then by their global norm at ``clip`` (0 = not). Norm scales and biases are not
    decayed. ``b1`` is the momentum, ``b2`` averages squares (for lion: the momentum that is kept), ``eps`` guards the
    division; None = what is usual for the optimiser.

    Muon (Jordan 2024, kellerjordan.github.io/posts/muon) takes the matrices inside the layers, AdamW at
    ``adam_learning_rate`` (read by muon only; None = the same) the embeddings, the head and the vectors.

    ``target_rate`` is a factor on the learning rate of ``params["target"]`` where a target is trained together with its
    ``params["draft"]`` (Cai et al. 2024, arXiv:2401.10774, section 2.2.2); until step ``target_from`` the target stays as
    it is, then its part of the optimiser begins. Raises ``UserError`` for what cannot be.
    """
    given = {
        key: value
        for key, value in locals().items()
        if isinstance(value, int | float) and key != "steps"
    }
    _check(name, schedule, b2, eps, given)
    rate = functools.partial(
        _schedule, schedule, steps=steps, warmup=int(warmup * steps), final=final
    )
    main, adam = rate(learning_rate), rate(adam_learning_rate or learning_rate)

    def make(change: Callable[[optax.Schedule], optax.Schedule]) -> optax.GradientTransformation:
        return _transform(
            name, change(main), change(adam), weight_decay, b1, b2, 1e-8 if eps is None else eps
        )

    def begun(step: Any, **_: Any) -> jax.Array:
        return jnp.asarray(step) >= target_from

    transform = make(lambda schedule: schedule)
    if target_rate != 1 or target_from:
        # Its own count of steps begins when it does (Adam's moments must not be older than the target's training).
        late = make(lambda schedule: lambda step: target_rate * schedule(step + target_from))
        late = optax.transforms.conditionally_mask(late, begun)
        transform = optax.partition({"target": late, "draft": transform}, _parts)
    chain = [transform]
    if clip:
        chain.insert(0, optax.clip_by_global_norm(clip))
    if clip_value:
        chain.insert(0, optax.clip(clip_value))
    if target_from:  # what is not trained yet has no part in the norm either
        gate = optax.scale_by_schedule(lambda step: jnp.where(begun(step), 1.0, 0.0))
        chain.insert(
            0,
            optax.masked(
                gate, lambda params: jax.tree.map(lambda part: part == "target", _parts(params))
            ),
        )
    return Optimiser(optax.chain(*chain), main)


def _check(
    name: str, schedule: str, b2: float | None, eps: float | None, given: Mapping[str, float]
) -> None:
    for key, value, choices in (("name", name, NAMES), ("schedule", schedule, SCHEDULES)):
        if value not in choices:
            listed = ", ".join(map(repr, choices[:-1]))
            raise UserError(
                f"config.optimiser.{key} is {value!r}; it must be {listed} or {choices[-1]!r}"
            )
    if name == "sgd" and b2 is not None:
        raise UserError("config.optimiser.b2 is given, but sgd averages no squares; leave it out")
    if name in ("sgd", "lion") and eps is not None:
        raise UserError(f"config.optimiser.eps is given, but {name} does not divide; leave it out")
    for key, value in given.items():
        if key in ("learning_rate", "adam_learning_rate"):
            told = None if value > 0 else "above 0"
        elif key in ("warmup", "b1", "b2"):
            told = None if 0 <= value < 1 else "at least 0 and below 1"
        else:
            told = None if value >= 0 else "at least 0"
        if told:
            raise UserError(f"config.optimiser.{key} is {value}; it must be {told}")


def _schedule(name: str, peak: float, *, steps: int, warmup: int, final: float) -> optax.Schedule:
    if name == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, final * peak)
    if name == "linear":
        then = optax.linear_schedule(peak, final * peak, steps - warmup)
    elif name == "constant":
        then = optax.constant_schedule(peak)
    else:  # continues the warm-up's own scale: at twice its length the rate is 1 / sqrt(2)
        then = lambda step: peak * (1 + jnp.maximum(step, 0) / max(warmup, 1)) ** -0.5  # noqa: E731
    return (
        optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), then], [warmup])
        if warmup
        else then
    )


def _transform(
    name: str,
    rate: optax.Schedule,
    adam_rate: optax.Schedule,
    weight_decay: float,
    b1: float | None,
    b2: float | None,
    eps: float,
) -> optax.GradientTransformation:
    b1 = _BETAS[name][0] if b1 is None else b1
    b2 = _BETAS[name][1] if b2 is None else b2
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
        # Three steps after AOL scaling come close to the usual five, and the steps are a third of the cost here.
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


def _parts(params: Any) -> Any:
    """ "target" or "draft" for each leaf."""
    if not isinstance(params, dict) or "target" not in params:
        raise UserError(
            "config.optimiser.target_rate and target_from are for training the target along, which this objective does "
            "not; leave them 1.0 and 0"
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "target" if path[0].key == "target" else "draft", params
    )


def _decayed(params: Any) -> Any:
    """All but norm scales and biases, which have a second dimension where heads are stacked."""

    def decayed(path, leaf):
        return leaf.ndim > 1 and jax.tree_util.keystr(path[-1:], simple=True) not in (
            "bias",
            "scale",
        )

    return jax.tree_util.tree_map_with_path(decayed, params)


def _hidden_matrices(params: Any) -> Any:
    def spec(path, leaf):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        names = names[1:] if names[0] in ("target", "draft") else names
        hidden = (
            leaf.ndim >= 2 and names[-1] in ("kernel", "proj", "proj_in") and names[0] != "head"
        )
        return (
            optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if hidden else None
        )  # heads are stacked

    return jax.tree_util.tree_map_with_path(spec, params)
