"""The inner drafters of a nested drafter: their checks, and how they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import drafters, rng
from specjax.errors import UserError
from specjax.registry import keys_of
from specjax.rng import RowKeys
from specjax.types import LM, Context, Draft, Drafter, ModelParams, Output

Stages = Mapping[str, Mapping[str, Any] | Drafter] | Sequence[Drafter]


def check(name: str, stages: Stages) -> None:
    """Checks the names and keys of inner drafters; ``name`` is the nested drafter.

    Raises:
        UserError: no drafters, an unknown name, or a key that a drafter does not take.
    """
    if not isinstance(stages, Mapping | Sequence) or isinstance(stages, str) or not stages:
        raise UserError(f"{name} needs inner drafters, label -> keys; give at least one")
    for label, keys in _in_order(stages):
        if isinstance(keys, Drafter):
            continue
        if not isinstance(keys, Mapping):
            raise UserError(
                f"{name}: drafter {label} is {keys!r}; give its keys, including name, or a Drafter"
            )
        drafters.check(**_with_name(label, keys))


def build(target: LM, stages: Stages, *, gaps: bool) -> list[Drafter]:
    """Makes the inner drafters.

    Args:
        target: the model to be accelerated.
        stages: drafters in a mapping are ordered by label, because a configuration keeps no other
            order.
        gaps: whether rounds may pass in which another drafter proposes.

    Raises UserError for a drafter that gives the target's pass what it has computed.
    """
    built = []
    for label, keys in _in_order(stages):
        if isinstance(keys, Drafter):
            built.append(keys)
            continue
        chosen = _with_name(label, keys)
        if gaps and "gaps" in keys_of(drafters.load(chosen["name"])):
            chosen["gaps"] = True
        built.append(drafters.make(chosen.pop("name"), target, **chosen))
    for drafter in built:
        if drafter.lower is not None:
            raise UserError(
                f"{drafter.name} with reuse is a drafter inside another one, whose drafts are not "
                "its own; leave reuse out"
            )
    return built


def stage_params(params: ModelParams, key: int | str) -> ModelParams:
    """The parameters for one inner drafter, at ``key`` in the nested drafter's parameters."""
    return params._replace(draft=params.draft[key])


def taps(stages: Sequence[Drafter]) -> tuple[int, ...]:
    """The layers of the target that any of the inner drafters reads, in ascending order."""
    return tuple(sorted({layer for stage in stages for layer in stage.taps}))


def with_taps(stage: Drafter, every: tuple[int, ...], value: Any) -> Any:
    """A ``Context`` or ``Output`` with the taps that one inner drafter reads.

    It has those of the layers ``every``. If no inner drafter names layers, or an output has none,
    it stays as it is.
    """
    if not every or (isinstance(value, Output) and not value.taps):
        return value
    own = tuple(value.taps[every.index(layer)] for layer in stage.taps)
    return value._replace(taps=own) if isinstance(value, Output) else value.replace(taps=own)


def run_if(
    needed: jax.Array,
    stage: Drafter,
    params: ModelParams,
    keys: RowKeys,
    context: Context,
    state: Any,
) -> tuple[Draft, Any]:
    """The stage's draft and new state if ``needed`` bool[], else zeros and the old state.

    A loop of at most one turn: a conditional would copy the caches in the state.
    """
    fake = fake_keys(context)
    # Only the shapes are needed.
    with jax.disable_jit(False):
        shape = jax.eval_shape(lambda old: stage.propose(params, fake, context, old)[0], state)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)

    def run(carry):
        return jnp.zeros((), bool), *stage.propose(params, keys, context, carry[2])

    return jax.lax.while_loop(lambda carry: carry[0], run, (needed, nothing, state))[1:]


def fake_keys(context: Context) -> RowKeys:
    """Keys for ``jax.eval_shape``, which draws nothing."""
    rows = rng.row_keys(0, context.length.shape[0])
    return RowKeys(rows, jnp.zeros((), jnp.int32), context.length)


def _in_order(stages: Stages) -> list[tuple[Any, Any]]:
    return sorted(stages.items()) if isinstance(stages, Mapping) else list(enumerate(stages))


def _with_name(label: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value, and the drafter's name, by default its label."""
    return {"name": str(label)} | {key: value for key, value in keys.items() if value is not None}
