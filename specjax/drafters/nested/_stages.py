"""The inner drafters of a nested drafter: their checks, and how they are made."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import drafters, rng, tree
from specjax.bound import Bound
from specjax.errors import UserError
from specjax.registry import keys_of
from specjax.rng import RowKeys
from specjax.types import (
    LM,
    Array,
    Context,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Params,
    Unreadable,
)

Stages = Mapping[str, Mapping[str, Any] | Drafter] | Sequence[Drafter]


def check(name: str, stages: Stages, only: str = "") -> None:
    """Checks the names and keys of inner drafters; ``name`` is the nested drafter.

    ``only``: what it takes, if it takes a single one.

    Raises:
        UserError: no drafters, several for ``only``, an unknown name, or a key that a drafter does
            not take.
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
    if only and len(stages) != 1:
        raise UserError(f"{name} takes {only.format(got=len(stages))}")


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
        if drafter.rare.lower is not None:
            raise UserError(
                f"{drafter.name} with reuse is a drafter inside another one, whose drafts are not "
                "its own; leave reuse out"
            )
    return built


def params_at(path: tuple[int | str, ...], params: ModelParams) -> Params:
    """The part at ``path`` of the nested drafter's parameters."""
    return functools.reduce(operator.getitem, path, params.draft)


def at(path: tuple[int | str, ...], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``ModelParams`` with the drafter's parameters that are at ``path``."""
    return Bound(_at, path, function)


def _at(path: tuple[int | str, ...], function: Callable, params: ModelParams, *rest: Any) -> Any:
    return function(params._replace(draft=params_at(path, params)), *rest)


def with_params(stage: Drafter, *path: int | str) -> Drafter:
    """The drafter with its parameters at ``path`` of those of the drafter that it is a part of."""

    def moved(part: Any, *names: str) -> Any:
        functions = {name: getattr(part, name) for name in names}
        return part._replace(**{name: each and at(path, each) for name, each in functions.items()})

    rest = stage.rare.rest and moved(stage.rare.rest, "idle")
    rare = moved(stage.rare, "rows", "learn")._replace(rest=rest)
    return moved(stage, "init", "propose", "update", "probs")._replace(rare=rare)


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


def run_if(needed: Array, stage: Drafter, state: Any, *args: Any) -> tuple[Draft, Any]:
    """The stage's draft and new state if ``needed`` bool[], else zeros and the old state.

    ``args``: params, keys and context. A loop of at most one turn: a conditional would copy the
    caches in the state.
    """
    unread = (args[0], _no_keys(args[2]), args[2])
    nothing = tree.zeros(lambda old: stage.propose(*unread, old)[0], state)

    def run(carry):
        return jnp.zeros((), bool), *stage.propose(*args, carry[2])

    return jax.lax.while_loop(lambda carry: carry[0], run, (needed, nothing, state))[1:]


def probs_of(drafts: Sequence[Draft], vocab_size: int) -> list[Array]:
    """f[B,n,V] of each draft, all of one dtype; 1 for a token that was not drawn."""
    every = [
        jax.nn.one_hot(draft.tokens, vocab_size) if draft.probs is None else draft.probs
        for draft in drafts
    ]
    dtype = functools.reduce(jnp.promote_types, [probs.dtype for probs in every])
    return [probs.astype(dtype) for probs in every]


def _in_order(stages: Stages) -> list[tuple[Any, Any]]:
    return sorted(stages.items()) if isinstance(stages, Mapping) else list(enumerate(stages))


def _with_name(label: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value, and the drafter's name, by default its label."""
    return {"name": str(label)} | {key: value for key, value in keys.items() if value is not None}


# What a drafter must be to draft for an inner model, whose text may be withdrawn.


def inside(name: str, target: LM, stages: Stages | None, **keys: Any) -> Drafter:
    """The drafter inside ``name``: that of ``stages``; None: ``prompt_lookup`` with these keys.

    Its ``init`` raises UserError if it reads the target's weights or its cache.

    Raises UserError for a drafter that reads the model's output, must take part in every round, or
    has a controller that learns.
    """
    if stages is None:
        stages = [drafters.make("prompt_lookup", target, **keys)]
    [drafter] = build(target, stages, gaps=True)
    if drafter.features or drafter.taps:
        raise UserError(
            f"{name}: {drafter.name} reads the output of the model that it drafts for, and the "
            "text of an inner model is a draft that may be withdrawn; take a lookup or a model"
        )
    if not drafter.gaps:
        raise UserError(
            f"{name}: {drafter.name} must take part in every round, and cannot return to an "
            "earlier text; take a lookup or a model"
        )
    if drafter.rare.verdicts:
        raise UserError(
            f"{name}: the controller of {drafter.name} learns from verdicts, and those of inner "
            "rounds are forgotten; take one that does not learn, such as fixed:4"
        )
    return drafter._replace(init=Bound(_init, name, drafter))


def _init(
    name: str, drafter: Drafter, params: ModelParams, context: Context, out: Output, slots: int
) -> Any:
    """``Drafter.init``, with the checks that need a state."""
    nothing = Unreadable(
        f"{name}: {drafter.name} reads the target's weights or its cache, and it would draft for "
        "another model; take a lookup or a model"
    )
    params, context = params._replace(target=nothing), context.replace(cache=nothing)
    state = drafter.init(params, context, out, slots)
    more = slots + 1 - context.tokens.shape[1]
    longer = jnp.pad(context.tokens, ((0, 0), (0, more)), constant_values=-1)
    context = context.replace(tokens=longer)
    # Only what it reads is of interest.
    tree.shapes(lambda: drafter.propose(params, _no_keys(context), context, state)[0])
    return state


def _no_keys(context: Context) -> RowKeys:
    """Keys where nothing is drawn: only shapes are of interest."""
    return RowKeys(rng.row_keys(0, len(context.length)), jnp.zeros((), jnp.int32), context.length)
