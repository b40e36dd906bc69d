"""The attention of one layer: specjax's own, as XLA compiles it, beside ``jax.nn``'s.

``specjax.models.attention`` reads the committed slots of a cache and the block itself, which is not
in the cache. ``jax.nn.dot_product_attention`` ("xla", and "cudnn" on NVIDIA GPUs) needs keys and
values of both in one array and in another layout. They get them so, and do not pay for it: the
times are the best case for them.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.accelerator.models import Scale
from experiments.loops import Loop, clock, repeat
from specjax import tree
from specjax.models.attention import Past, Scores, Stored, attend
from specjax.models.transformer_config import TransformerConfig

SAMPLES = 5
ITERATIONS = 20
OWN = "specjax"


class Problem(NamedTuple):
    """The arrays of one attention: T tokens after S committed ones, all in bfloat16."""

    q: jax.Array  # [B,T,N,D]
    keys: jax.Array  # [B,S+T,K,D]
    values: jax.Array
    visible: jax.Array  # bool[B,T,T] inside the block


def problem(config: TransformerConfig, batch: int, context: int, shape: str, new: int) -> Problem:
    """Random keys, queries and values; a chain, or a binary tree."""
    keys = jax.random.split(jax.random.key(0), 3)
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    stored = (batch, context + new, config.num_kv_heads, config.head_dim)
    layout = tree.chain_layout(batch, new)
    if shape == "tree":
        parents = (jnp.arange(new, dtype=jnp.int32) - 1) // 2
        layout = tree.layout(jnp.broadcast_to(parents, (batch, new)).at[:, 0].set(-1))
    q = normal(keys[0], (batch, new, config.num_heads, config.head_dim))
    return Problem(q, normal(keys[1], stored), normal(keys[2], stored), layout.visible)


def own(given: Problem) -> tuple[Callable, Any]:
    """specjax's attention, and its arguments: the cache has the committed tokens only."""
    batch, new, heads, width = given.q.shape
    committed, groups = given.keys.shape[1] - new, heads // given.keys.shape[2]
    k, v = given.keys.swapaxes(1, 2), given.values.swapaxes(1, 2)
    depth = jnp.broadcast_to(given.visible.sum(-1) - 1, (batch, new))
    cache = Stored(k[:, :, :committed], v[:, :, :committed])
    past = Past(jnp.full((batch,), committed, jnp.int32), tree.Layout(given.visible, depth))
    scores = Scores(math.sqrt(width))

    def run(q, past, cache, k, v):
        q = q.reshape(batch, new, -1, groups, width).transpose(0, 2, 3, 1, 4)
        out = attend(q.reshape(batch, -1, groups * new, width), scores, past, cache, k, v)
        out = out.reshape(batch, -1, groups, new, width).transpose(0, 3, 1, 2, 4)
        return out.reshape(batch, new, heads, width)

    return run, (past, cache, k[:, :, committed:], v[:, :, committed:])


def library(given: Problem, implementation: Any) -> tuple[Callable, Any]:
    """``jax.nn.dot_product_attention`` and its arguments; a pass over one token needs no mask."""
    batch, new = given.q.shape[:2]
    committed = given.keys.shape[1] - new
    seen = jnp.ones((batch, new, committed), bool)
    mask = None if new == 1 else jnp.concatenate([seen, given.visible], -1)[:, None]
    attention = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    return lambda q, k, v, mask: attention(q, k, v, mask=mask), (given.keys, given.values, mask)


def implementations() -> tuple[str, ...]:
    """What is compared on this device."""
    gpu = jax.default_backend() == "gpu"
    return (OWN, "jax.nn xla", *(("jax.nn cudnn",) if gpu else ()))


def compare(name: str, size: Scale) -> list[dict]:
    """Every implementation at each batch, context and block, with its error in bfloat16."""
    rows, config = [], size.models[name]
    blocks = [("chain", n) for n in size.sizes if n in (1, *size.trees)]
    blocks += [("tree", n) for n in size.trees]
    for batch in size.batches:
        for context in size.contexts:
            for shape, new in blocks:
                given = problem(config, batch, context, shape, new)
                where = {"batch_size": batch, "context": context, "shape": shape, "tokens": new}
                rows += [{"model": name} | where | row for row in measure(given)]
    return rows


def measure(given: Problem) -> list[dict]:
    """One row for each implementation; those that do not take these shapes say why."""
    expected = exact(given)
    loops: dict[Any, tuple[Loop, int]] = {}
    rows = []
    for name in implementations():
        run, arguments = own(given) if name == OWN else library(given, name.split()[-1])
        row: dict[str, Any] = {"implementation": name}
        rows.append(row)
        try:
            out = jax.jit(run)(given.q, *arguments)
        except Exception as error:  # the library raises several kinds for shapes it lacks
            row["why"] = str(error).partition("\n")[0] or type(error).__name__
            continue
        row["error"] = float(jnp.abs(out.astype(jnp.float32) - expected).max())

        def body(_, q, *arguments, run=run):
            return run(q, *arguments)

        loops[name] = repeat(body, ITERATIONS, given.q, *arguments), ITERATIONS
    median = {key: statistics.median(each) for key, each in clock(loops, SAMPLES).items()}
    for row in rows:
        if (seconds := median.get(row["implementation"])) is not None:
            row |= {"us": 1e6 * seconds, "relative": seconds / median[OWN]}
    return rows


def exact(given: Problem) -> jax.Array:
    """The result in float32."""
    q, keys, values = (x.astype(jnp.float32) for x in given[:3])
    wide = Problem(q, keys, values, given.visible)
    run, arguments = library(wide, "xla")
    with jax.default_matmul_precision("highest"):
        return jax.jit(run)(wide.q, *arguments)
