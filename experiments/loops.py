"""Compiled loops for timing: iterations that depend on each other, so that none can be dropped."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import tree
from specjax.bench.timing import commit_none
from specjax.types import LM, DecodeState

Loop = Callable[[], Any]


def tie(iteration: Any, *values: Any) -> tuple:
    """The values; for the compiler they depend on ``iteration``, so it cannot hoist their use."""
    return jax.lax.optimization_barrier((iteration, values))[1]


def program(body: Callable[..., Any], iterations: int) -> Any:
    """The jitted loop ``(carry, arguments) -> carry`` of ``repeat``; the carry is donated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(carry, arguments):
        return jax.lax.fori_loop(
            0, iterations, lambda iteration, carry: body(iteration, carry, *arguments), carry
        )

    return loop


def repeat(body: Callable[..., Any], iterations: int, carry: Any, *arguments: Any) -> Loop:
    """A compiled loop of ``carry = body(iteration, carry, *arguments)``.

    Each call continues with the carry of the call before.
    """
    loop, box = program(body, iterations), [jax.tree.map(jnp.copy, carry)]

    def run():
        box[0] = loop(box[0], arguments)
        return box[0]

    return run


def forward(
    target: LM,
    params: Any,
    state: DecodeState,
    size: int,
    layout: tree.Layout | None,
    iterations: int,
) -> Loop:
    """Target passes over ``size`` tokens: a chain, or a tree with this layout.

    Only one of the logits is read: reading all of them is part of acceptance.
    """

    def body(_, carry, params, layout):
        tokens, cache = carry
        out, block = target.apply(params, tokens, cache, layout)
        cache = commit_none(target, cache, block)
        (logits,) = tie(tokens, out.logits)
        return tokens + (logits[..., 0] > 9).astype(jnp.int32), cache

    return repeat(body, iterations, (state.tokens[:, :size], state.cache), params, layout)


def clock(loops: dict[Any, tuple[Loop, int]], repeats: int) -> dict[Any, list[float]]:
    """Seconds per iteration of each loop, ``repeats`` samples, all loops in turns.

    Args:
        loops: key -> (loop, its iterations). The first call of each is not timed.
        repeats: samples of each loop.
    """
    seconds: dict[Any, list[float]] = {key: [] for key in loops}
    for loop, _ in loops.values():
        jax.block_until_ready(loop())
    for _ in range(repeats):
        for key, (loop, iterations) in loops.items():
            began = time.perf_counter()
            jax.block_until_ready(loop())
            seconds[key].append((time.perf_counter() - began) / iterations)
    return seconds
