"""What experiments/accelerator measures: the shapes, and one function a section, each of which gives its rows.

Nothing here knows of processes, files or time limits; see run.py.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tree_cost.run import clock, forward, repeat, tie
from specjax import accept, drafters, rng, step, theory
from specjax.bench import passes as bench
from specjax.bench.passes import Job, Method
from specjax.drafters import none
from specjax.models import lm
from specjax.models.transformer import RopeScaling, TransformerConfig
from specjax.types import Draft, ModelParams, Output

SMALL = TransformerConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_positions=131072,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
)
LARGE = dataclasses.replace(
    SMALL, hidden_size=4096, intermediate_size=14336, num_layers=32, head_dim=128, tie_embeddings=False,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
)  # fmt: skip
TINY = dataclasses.replace(
    SMALL,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


class Scale(NamedTuple):
    """How much is measured."""

    models: dict[str, TransformerConfig]
    batches: tuple[int, int] = (1, 8)
    prompt: int = 128
    new: int = 128
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    trees: tuple[int, ...] = (8, 32, 64)
    gammas: tuple[int, ...] = (1, 2, 4, 8)
    rates: tuple[float, ...] = (0.3, 0.6, 0.8, 0.95)
    passes: int = 3
    copy: int = 1 << 30  # elements of 2 bytes


def scale(tiny: bool) -> Scale:
    """The study, or a rehearsal of it."""
    if not tiny:
        return Scale({"1b": SMALL, "8b": LARGE})
    large = dataclasses.replace(TINY, num_layers=2, tie_embeddings=False)
    return Scale(
        {"1b": TINY, "8b": large}, (1, 2), 16, 16, (1, 4), (4,), (2,), (0.3, 0.95), 1, 1 << 20
    )


def weights(config: TransformerConfig, seed: int) -> dict:
    """Random bfloat16 parameters, made on the device leaf by leaf: equal shapes compile once."""

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key, shape, spread):
        return (spread * jax.random.normal(key, shape, jnp.bfloat16)).astype(jnp.bfloat16)

    leaves, tree = jax.tree.flatten(lm.abstract_params(config, jnp.bfloat16))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = [
        normal(key, leaf.shape, 0.02) if leaf.ndim > 1 else jnp.ones(leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    params = jax.tree.unflatten(tree, made)
    loud = 8 * math.sqrt(config.num_layers)
    params["embed"]["embedding"] = normal(keys[0], params["embed"]["embedding"].shape, loud)
    if (
        not config.tie_embeddings
    ):  # every token's successor is the next id; tied embeddings say the same token again
        params["head"]["kernel"] = jnp.roll(params["embed"]["embedding"].T, 1, axis=1) / loud
    return params


def bytes_per_step(config: TransformerConfig, params: dict, batch: int, length: float) -> float:
    """What one plain step has to read: every weight but the embedding table (one row a token), the keys and values."""
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tie_embeddings:
        read -= params["embed"]["embedding"].nbytes
    return read + batch * length * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


def make_job(config: TransformerConfig, params: dict, batch: int, size: Scale) -> Job:
    """Greedy decoding of one batch of random prompts."""
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (batch, size.prompt)).tolist()
    target = lm.from_config(config, jnp.dtype(jnp.bfloat16))
    return Job(target, params, prompts, {"temperature": 0.0}, batch, size.new, (), 0, size.passes)


def at_once(work: Sequence[Callable[[], Any]]) -> None:
    """Runs them in threads: compiling is most of it."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(task) for task in work]:
            done.result()


def warm(work: Sequence[tuple[Job, Method | None]]) -> None:
    """Compiles the loops of these methods (None: plain decoding), and runs each once: the first real pass is slower."""
    at_once([functools.partial(bench.run_pass, job, method, brief=True) for job, method in work])
    for job, method in work:
        bench.run_pass(job, method)


# Sections. Each gives its rows. --------------------------------------------------------------------------------------


def bandwidth(size: Scale) -> list[dict]:
    """Copies a large array, there and back."""
    turns, x = 10, jnp.zeros((size.copy,), jnp.bfloat16)
    loop = repeat(lambda turn, x: x + turn.astype(x.dtype), turns, x)
    seconds = statistics.median(clock({"copy": (loop, turns)}, 5)["copy"])
    return [{"bytes": 2 * x.nbytes, "seconds": seconds, "bytes_per_second": 2 * x.nbytes / seconds}]


def autoregressive(name: str, size: Scale, params: dict) -> list[dict]:
    """Plain decoding: the compiled loop, and with prefill and the host."""
    config, rows = size.models[name], []
    jobs = [make_job(config, params, batch, size) for batch in size.batches]
    warm([(job, None) for job in jobs])
    for job in jobs:
        passes = [bench.run_pass(job, None) for _ in range(size.passes)]
        rates = [p.tokens / p.loop for p in passes]
        alone = bench.time_of_verify(job, None, 1)
        rows.append(
            {
                "batch_size": job.batch_size,
                "tokens_per_second": statistics.median(rates),
                "spread": [min(rates), max(rates)],
                "with_prefill": statistics.median(p.tokens / max(p.walls) for p in passes),
                "step_ms": 1e3 * statistics.median(p.loop / p.loops for p in passes),
                "pass_alone_ms": 1e3 * alone,
                "bytes_per_step": bytes_per_step(
                    config, params, job.batch_size, size.prompt + size.new / 2
                ),
            }
        )
    return rows


def verify(name: str, size: Scale, params: dict) -> list[dict]:
    """Passes over blocks, in turns."""
    rows, turns = [], 10
    for batch in size.batches:
        job = make_job(size.models[name], params, batch, size)
        state = bench.begin(
            job, none.make(job.target), ModelParams(params), *next(bench.batches(job))
        )
        loops: dict[Any, Any] = {}
        for n in size.sizes:
            loops["chain", n] = forward(job.target, params, state, n, None, turns), turns
            if n in size.trees:
                parents = (
                    jnp.broadcast_to((jnp.arange(n, dtype=jnp.int32) - 1) // 2, (batch, n))
                    .at[:, 0]
                    .set(-1)
                )
                loops["tree", n] = forward(job.target, params, state, n, parents, turns), turns
        at_once([loop for loop, _ in loops.values()])
        median: dict[Any, float] = {
            key: statistics.median(all_) for key, all_ in clock(loops, 5).items()
        }
        for (shape, n), seconds in median.items():
            relative = seconds / median["chain", 1]
            rows.append(
                {
                    "batch_size": batch,
                    "shape": shape,
                    "tokens": n,
                    "ms": 1e3 * seconds,
                    "relative": relative,
                }
            )
    return rows


def time_of_accept(job: Job, method: Method) -> float:
    """Seconds of the second half of a round: verdict, cut, commit, the drafter's update. The text stays as long as it is."""
    state = bench.begin(job, method.drafter, method.params, *next(bench.batches(job)))
    batch, nodes, turns = job.batch_size, method.drafter.nodes, 20
    draft = Draft(jnp.ones((batch, nodes), jnp.int32), jnp.ones((batch, nodes), bool))
    block = jax.eval_shape(
        job.target.apply, job.params, jnp.zeros((batch, nodes + 1), jnp.int32), state.cache
    )[0]
    out = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), block)

    def body(_, state, params, length, draft, out: Output):
        now = state.replace(
            length=length,
            done=jnp.zeros_like(state.done),
            cache=state.cache.replace(length=length - 1),
        )
        draft, out = tie(state.tokens, draft, out)
        keys = rng.RowKeys(now.keys, now.round, now.length)
        scored = step.Scored(draft, now.draft, out, now.cache)
        return step.decide(
            job.target, method.drafter, method.accept, params, now, keys, scored, None
        )[0]

    loop = repeat(body, turns, state, method.params, state.length, draft, out)
    return statistics.median(clock({"accept": (loop, turns)}, 5)["accept"])


def speculation(name: str, size: Scale, params: dict) -> Callable[[int, float], Method]:
    """Methods by gamma and rate: a draft model is run, and ``controlled`` says whether it was right."""
    config = size.models[name]
    shape = (
        size.models["1b"]
        if name == "8b"
        else dataclasses.replace(config, num_layers=min(2, config.num_layers))
    )
    draft_params = weights(shape, 1)
    target, model = (lm.from_config(c, jnp.dtype(jnp.bfloat16)) for c in (config, shape))

    @functools.cache
    def drafter(gamma: int):
        inner = drafters.make("draft_model", target, model=model, params=draft_params, gamma=gamma)
        return drafters.make("controlled", target, drafters=[inner])

    @functools.cache
    def given(gamma: int) -> dict:
        return drafter(gamma).init_params(jax.random.key(0))

    def method(gamma: int, rate: float) -> Method:
        chosen = given(gamma) | {
            "rate": jnp.asarray(rate, jnp.float32)
        }  # the rate is a parameter: one program for all
        label = f"gamma {gamma}, rate {rate}"
        return Method(label, drafter(gamma), accept.load("chain"), ModelParams(params, chosen))

    return method


def rounds(job: Job, methods: Sequence[Method], rates: Sequence[float]) -> list[dict]:
    """Methods that differ in the rate only, against plain decoding, in turns; with the costs of their parts."""
    plain, runs = [], [[] for _ in methods]
    for _ in range(job.repeats):
        plain.append(bench.run_pass(job, None))
        for found, method in zip(runs, methods, strict=True):
            found.append(bench.run_pass(job, method))
    one = methods[0]
    gamma = one.drafter.nodes
    cost = {
        "step": bench.time_of_verify(job, None, 1),
        "draft": bench.time_of_draft(job, one),
        "verify": bench.time_of_verify(job, one, gamma + 1),
        "accept": time_of_accept(job, one),
    }
    rate_of = lambda passes: statistics.median(p.tokens / p.loop for p in passes)  # noqa: E731
    rows = []
    for rate, found in zip(rates, runs, strict=True):
        gain = (found[0].tokens / found[0].loops) / (plain[0].tokens / plain[0].loops)
        predicted = theory.speedup(gain, cost["draft"], cost["verify"], cost["step"])
        whole = statistics.median(p.loop / p.loops for p in found)
        speedup = rate_of(found) / rate_of(plain)
        rows.append(
            {
                "batch_size": job.batch_size,
                "gamma": gamma,
                "rate": rate,
                "block_efficiency": sum(c.tokens for c in found[0].counts)
                / sum(c.rounds for c in found[0].counts),
                "identical": sum(
                    a == b for a, b in zip(found[0].outputs, plain[0].outputs, strict=True)
                ),
                "tokens_per_second": rate_of(found),
                "speedup": speedup,
                "predicted_speedup": predicted,
                "system_efficiency": speedup / predicted,
                "costs_ms": {part: 1e3 * seconds for part, seconds in cost.items()},
                "round_ms": 1e3 * whole,
                "gap_ms": 1e3 * (whole - cost["draft"] - cost["verify"] - cost["accept"]),
            }
        )
    return rows


def controlled(name: str, size: Scale, params: dict) -> list[dict]:
    """All rates and draft lengths at batch 1; at the larger batch one length."""
    method, rows = speculation(name, size, params), []
    plan = [(size.batches[0], gamma) for gamma in size.gammas] + [
        (size.batches[1], size.gammas[len(size.gammas) // 2])
    ]
    jobs = {batch: make_job(size.models[name], params, batch, size) for batch in size.batches}
    first = [(jobs[batch], method(gamma, size.rates[0])) for batch, gamma in plan]
    warm([*((job, None) for job in jobs.values()), *first])
    for batch, gamma in plan:
        rows += rounds(jobs[batch], [method(gamma, rate) for rate in size.rates], size.rates)
    return rows


def buffers(name: str, size: Scale, params: dict) -> list[dict]:
    """One draft length and rate, under the flags of this process."""
    job, gamma = (
        make_job(size.models[name], params, size.batches[0], size),
        size.gammas[len(size.gammas) // 2],
    )
    one = speculation(name, size, params)(gamma, size.rates[-1])
    warm([(job, None), (job, one)])
    return rounds(job, [one], size.rates[-1:])


def needed(name: str, size: Scale) -> float:
    """Bytes of the device that a size takes at the most: both models, the caches of all loops, and what passes need."""
    config, small = size.models[name], size.models["1b"]
    count = sum(
        math.prod(leaf.shape)
        for c in (config, small)
        for leaf in jax.tree.leaves(lm.abstract_params(c))
    )
    slots = size.prompt + size.new + max(size.sizes)
    cache = (
        size.batches[-1] * slots * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    )
    logits = size.batches[-1] * max(size.sizes) * config.vocab_size * 4
    return 2 * count + 2 * (len(size.sizes) + len(size.trees)) * cache + 4 * logits
