"""Several samples of each prompt: the prompt is read once, and its state repeated."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode
from specjax import sampling as sampling_lib
from specjax.sampling import Sampling
from specjax.sharding import states
from specjax.types import LM, DecodeState, Drafter, ModelParams


def prefill(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompt: jax.Array,
    lengths: jax.Array,
    keys: jax.Array,
    samples: int,
    *,
    max_len: int,
    sampling: Sampling,
    limit: jax.Array,
) -> DecodeState:
    """``decode.prefill`` of B prompts, for ``samples`` rows each, which are neighbours.

    The arguments are those of ``decode.prefill``. ``prompt`` and ``lengths`` have B rows; ``keys``
    (of ``rng.sample_keys``), ``sampling``, ``limit`` and the state have B * ``samples``. The
    drafter begins with the settings of the first sample.

    Raises:
        UserError: as ``decode.prefill``, and for a drafter with an array that belongs to no row.
    """
    rest = (limit, keys, sampling)
    firsts = rest if samples == 1 else _firsts(rest, samples)
    options = (target, drafter, max_len)
    arrays = (prompt, lengths, *firsts)
    state = _make(*options)(params, *arrays)
    if samples == 1:
        return state
    axes = _axes(options, *states.abstract((params, arrays)))
    return _repeated(state, samples, axes, rest)


@functools.partial(jax.jit, static_argnums=1)
def _firsts(values: Any, samples: int) -> Any:
    return jax.tree.map(lambda x: x[::samples], values)


@functools.cache
def _make(target: LM, drafter: Drafter, max_len: int) -> Any:
    def make(params, prompt, lengths, limit, keys, sampling):
        given = (target, drafter, params, prompt, lengths, keys)
        return decode.prefill(*given, limit=limit, sampling=sampling, max_len=max_len)

    return make


@functools.lru_cache(maxsize=64)
def _axes(options: tuple, leaves: tuple, treedef: Any) -> tuple[int | None, ...]:
    """The axis of each leaf of a state that has its rows. Kept: finding them traces a prefill."""
    params, arrays = jax.tree.unflatten(treedef, leaves)
    why = "its state cannot be repeated for several samples of a prompt; take n=1"
    return states.row_axes(options[1], _make(*options), params, arrays, why)[0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _repeated(
    state: DecodeState, samples: int, axes: tuple[int | None, ...], rest: tuple
) -> DecodeState:
    """The state with ``samples`` rows for each; ``rest``: their limits, keys and settings."""
    rows = jnp.repeat(jnp.arange(state.length.shape[0]), samples)
    leaves, treedef = jax.tree.flatten(state)
    pairs = zip(leaves, axes, strict=True)
    taken = [leaf if axis is None else jnp.take(leaf, rows, axis) for leaf, axis in pairs]
    state = jax.tree.unflatten(treedef, taken)
    # Copies: the state will be donated, and the caller's arrays must stay valid.
    limit, keys, sampling = jax.tree.map(jnp.copy, rest)
    return state.replace(
        keys=keys,
        limit=limit,
        sampling=sampling_lib.after_prompt(sampling, state.length),
        done=state.length >= limit,
    )
