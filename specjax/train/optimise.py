"""What turns gradients into updates: optimisers, schedules, clipping, a rate for a joint target."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from specjax import declare
from specjax.errors import UserError
from specjax.train.settings import OptimiserKeys

_BETAS = {"adamw": (0.9, 0.95), "muon": (0.9, 0.95), "sgd": (0.9, None), "lion": (0.9, 0.99)}


class Optimiser(NamedTuple):
    """A gradient transformation, and the learning rate that it uses (for the log)."""

    transform: optax.GradientTransformation
    schedule: Callable[[Any], Any]  # step -> learning rate


@declare.method(OptimiserKeys)
def optimiser(steps: int, keys: OptimiserKeys) -> Optimiser:
    """An optimiser with warm-up, a schedule, and clipped gradients.

    Muon (Jordan 2024, kellerjordan.github.io/posts/muon) updates the matrices inside the layers,
    and AdamW the embeddings, the head and the vectors. A target that is trained together with its
    heads, ``params["target"]`` beside ``params["draft"]``, has its own rate and beginning (Cai et
    al. 2024, arXiv:2401.10774, section 2.2.2).

    Args:
        steps: of the run.
        keys: of ``OptimiserKeys``.

    Raises UserError for invalid values.
    """
    rate = functools.partial(
        _schedule, keys.schedule, steps=steps, warmup=int(keys.warmup * steps), final=keys.final
    )
    main, adam = rate(keys.learning_rate), rate(keys.adam_learning_rate or keys.learning_rate)
    transform, start = _transform(keys, main, adam), keys.target_from
    if keys.target_rate != 1 or start:
        # The target's own count of steps starts at step ``start``.
        late = [
            lambda step, rate=rate: keys.target_rate * rate(step + start) for rate in (main, adam)
        ]
        # The target's state (Adam's moments) starts at that step too.
        begun = functools.partial(_begun, start)
        target = optax.transforms.conditionally_mask(_transform(keys, *late), begun)
        transform = optax.partition({"target": target, "draft": transform}, _parts)
    return Optimiser(optax.chain(*_clipping(keys), transform), main)


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
    keys: OptimiserKeys, rate: optax.Schedule, adam_rate: optax.Schedule
) -> optax.GradientTransformation:
    b1, b2 = _BETAS[keys.name]
    b1, b2 = b1 if keys.b1 is None else keys.b1, b2 if keys.b2 is None else keys.b2
    eps, decay = 1e-8 if keys.eps is None else keys.eps, keys.weight_decay
    if keys.name == "adamw":
        return optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=decay, mask=_decayed)
    if keys.name == "lion":
        return optax.lion(rate, b1=b1, b2=b2, weight_decay=decay, mask=_decayed)
    if keys.name == "sgd":
        return optax.chain(optax.add_decayed_weights(decay, _decayed), optax.sgd(rate, momentum=b1))
    return optax.contrib.muon(
        rate,
        # Three steps after AOL scaling come close to the usual five, and a step is a third of the
        # cost here.
        ns_steps=3,
        preconditioning="aol",
        beta=b1,  # 0.95 is for longer runs
        eps=eps,
        weight_decay=decay,
        adam_b1=b1,
        adam_b2=b2,
        adam_learning_rate=adam_rate,
        muon_weight_dimension_numbers=_hidden_matrices,
    )


def _clipping(keys: OptimiserKeys) -> list:
    """The transformations before the optimiser, in the order in which they apply."""
    chain, start = [], keys.target_from
    if start:  # a target that is not trained yet is not counted in the norm either
        gate = optax.scale_by_schedule(lambda step: jnp.where(_begun(start, step), 1.0, 0.0))
        is_target = lambda params: jax.tree.map(lambda part: part == "target", _parts(params))  # noqa: E731
        chain.append(optax.masked(gate, is_target))
    if keys.clip_value:
        chain.append(optax.clip(keys.clip_value))
    if keys.clip:
        chain.append(optax.clip_by_global_norm(keys.clip))
    return chain


def _begun(target_from: int, step: Any, **_: Any) -> jax.Array:
    return jnp.asarray(step) >= target_from


FOR_JOINT = (
    "config.optimiser.target_rate and target_from are for objectives that train the target "
    "together with its heads; leave them 1.0 and 0"
)


def _parts(params: Any) -> Any:
    """ "target" or "draft" for each leaf."""
    if not isinstance(params, dict) or "target" not in params:
        raise UserError(FOR_JOINT)
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
        # A convolution has a few weights for each channel, and is no map between channels.
        if not matrix or names[0] == "head" or any(name.endswith("_conv") for name in names):
            return None
        # The last two dimensions: heads are stacked in those before.
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(spec, params)
