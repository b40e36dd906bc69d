"""Decoding for experiments/real_model: one prefill per batch for all methods, timed loops."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, prompt, rng, sampling
from specjax.bench import metrics
from specjax.bench.passes import Method
from specjax.drafters import none
from specjax.types import LM, Context, DecodeState, ModelParams, Output

BRIEF = 2  # new tokens of the run that compiles
# Prompts are padded to one of these widths: a short one need not be read as a long one.
WIDTHS = (128, 768)


class Setting(NamedTuple):
    """What all methods share."""

    target: LM
    params: Any
    eos_id: tuple[int, ...]
    batch_size: int
    new_tokens: int
    slots: int  # of the caches of all methods: the longest text, and the largest draft
    seed: int


class Read(NamedTuple):
    """A batch of prompts that the target has read."""

    tokens: jax.Array  # i32[B,slots+1]
    lengths: jax.Array  # i32[B]; the last rows repeat the first one where prompts are missing
    cache: Any
    out: Output  # of the prompts, without logits


class Run(NamedTuple):
    """One batch decoded by one method; one entry per prompt, and the seconds of all."""

    outputs: list[list[int]]
    counts: list[metrics.Counts]  # empty for plain decoding
    seconds: float


def slots_of(methods: Sequence[Method], longest: int, new_tokens: int) -> int:
    """The slots of the caches that every method can use."""
    return longest + new_tokens + max(method.drafter.nodes for method in methods)


def width_of(ids: Sequence[int]) -> int:
    """The width to which a prompt is padded."""
    return next(width for width in WIDTHS if width >= len(ids))


def read(setting: Setting, prompts: Sequence[Sequence[int]], method: Method | None = None) -> Read:
    """Feeds a batch of prompts to the target, with the taps that the method reads.

    Missing rows repeat the first prompt.
    """
    rows = [*prompts, *[prompts[0]] * (setting.batch_size - len(prompts))]
    width = max(map(width_of, rows))
    packed, lengths = decode.pack_prompts(rows, width)
    target = setting.target if method is None else method.drafter.tapped(setting.target)
    read = _read(target, setting.slots, setting.params, packed, lengths)
    return jax.block_until_ready(Read(read[0], lengths, *read[1:]))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(target: LM, slots: int, params, packed, lengths):
    batch, width = packed.shape
    tokens = jnp.full((batch, slots + 1), -1, jnp.int32).at[:, :width].set(packed)
    cache = target.init_cache(batch, slots)
    out, cache = prompt.feed(target, params, packed[:, : width - 1], lengths - 1, cache)
    return tokens, cache, out


@functools.partial(jax.jit, static_argnums=0)
def _begin(drafter, params: ModelParams, read: Read, limit, keys, settings) -> DecodeState:
    """The state of ``decode.prefill``, without reading the prompts again."""
    read, limit, keys, settings = jax.tree.map(jnp.copy, (read, limit, keys, settings))
    slots = read.tokens.shape[1] - 1
    width, newest = read.out.hidden.shape[1] + 1, (read.lengths - 2)[:, None, None]
    taps = tuple(jnp.take_along_axis(tap, newest, 1)[:, 0] for tap in read.out.taps)
    context = Context(read.tokens[:, :width], read.lengths, settings, read.cache, taps)
    return DecodeState(
        tokens=read.tokens,
        length=read.lengths,
        limit=limit,
        done=read.lengths >= limit,
        failed=jnp.full(read.lengths.shape, -1, jnp.int32),
        cache=read.cache,
        draft=drafter.init(params, context, read.out, slots),
        keys=keys,
        round=jnp.zeros((), jnp.int32),
        sampling=settings,
        taps=taps,
        made_for=drafter.tag,
    )


def decode_batch(
    setting: Setting,
    method: Method | None,
    read: Read,
    numbers: Sequence[int],
    temperature: float,
    *,
    brief: bool = False,
) -> Run:
    """Decodes a batch, plainly if ``method`` is None; only the loop is timed.

    ``numbers`` identify the prompts, for their noise; rows beyond them are finished at the start.
    """
    drafter = none.make(setting.target) if method is None else method.drafter
    params = ModelParams(setting.params) if method is None else method.params
    real = np.arange(setting.batch_size) < len(numbers)
    most = BRIEF if brief else setting.new_tokens
    spare = [2**20 + row for row in range(setting.batch_size - len(numbers))]
    keys = rng.row_keys(setting.seed, [*numbers, *spare])
    settings = sampling.make_sampling(setting.batch_size, temperature=temperature)
    limit = read.lengths + jnp.where(real, most, 0)
    state = jax.block_until_ready(_begin(drafter, params, read, limit, keys, settings))
    began, records = time.perf_counter(), None
    loop = {"max_steps": setting.new_tokens, "eos_id": setting.eos_id}
    if method is None:
        state = decode.autoregressive(setting.target, params, state, **loop)
    else:
        state, records = decode.generate(
            setting.target, drafter, method.accept, params, state, **loop
        )
    jax.block_until_ready(state.tokens)
    seconds = time.perf_counter() - began
    decode.check(state)
    outputs = decode.outputs(state, [int(n) for n in read.lengths])[: len(numbers)]
    counts = []
    if records is not None:
        records = jax.device_get(records)
        rows = np.eye(setting.batch_size, dtype=bool)[: len(numbers)]
        counts = [metrics.count(records, row.tolist(), drafter.longest) for row in rows]
    return Run(outputs, counts, seconds)


def compile_all(setting: Setting, methods: Sequence[Method], batches: Sequence[Sequence]) -> None:
    """Compiles every program of these methods, several at the same time.

    ``batches`` are prompts of each width that occurs.
    """

    def compile_one(method: Method | None) -> None:
        for batch in batches:
            decode_batch(setting, method, read(setting, batch, method), [0], 0.0, brief=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(compile_one, method) for method in (None, *methods)]:
            done.result()
