"""A number that changes during training: a value, and later values from a share of the steps on."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import UserError


class Stages(NamedTuple):
    """``values[i]`` holds from the share ``starts[i]`` of the steps on; the first start is 0."""

    values: tuple[float, ...]
    starts: tuple[float, ...]


def parse(name: str, text: str | float) -> Stages:
    """ "0.3,0.1@0.67": 0.3, and 0.1 from 67 % of the steps on; a number: always that.

    Raises UserError, with the name of the key.
    """
    form = f"{name} is {text!r}; give a value >= 0, and later ones with a share of the steps in "
    form += 'ascending order, such as "0.3,0.1@0.67"'
    if isinstance(text, bool):
        raise UserError(form)
    values, starts = [], []
    for part in str(text).split(","):
        value, at, start = part.partition("@")
        try:
            values.append(float(value))
            starts.append(float(start) if at else 0.0)
        except ValueError:
            raise UserError(form) from None
        if bool(at) != (len(values) > 1):
            raise UserError(form)
    ascending = all(a < b for a, b in itertools.pairwise(starts))
    finite = all(math.isfinite(x) and x >= 0 for x in values)
    if not (ascending and finite and starts[-1] < 1):
        raise UserError(form)
    return Stages(tuple(values), tuple(starts))


def at(stages: Stages, step: jax.Array | int, steps: int) -> jax.Array:
    """f32[]: the value at a step, from 0, of so many steps."""
    value = jnp.float32(stages.values[0])
    for later, start in zip(stages.values[1:], stages.starts[1:], strict=True):
        value = jnp.where(jnp.asarray(step) >= math.ceil(round(start * steps, 9)), later, value)
    return jnp.float32(value)


def last(stages: Stages) -> float:
    """The value at the end."""
    return stages.values[-1]
