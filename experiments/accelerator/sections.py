"""The measurements of experiments/accelerator: one function per section, which returns its rows.

Processes, files and time limits are in run.py and child.py.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.accelerator.models import Scale, bytes_per_step, draft_shape, make_job, weights
from experiments.loops import Loop, clock, forward, repeat, tie
from specjax import accept, drafters, rng, step, theory
from specjax.bench import measuring, passes
from specjax.bench.passes import Job, Method, Pass
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import layout
from specjax.types import Draft, ModelParams

SAMPLES = 5  # of each timed loop


def at_once(tasks: Sequence[Callable[[], Any]]) -> None:
    """Runs tasks in threads: most of their time is compilation."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()


def warm(work: Sequence[tuple[Job, Method | None]]) -> None:
    """Compiles the loops of these methods (None: plain decoding), and runs each once.

    The first whole pass is slower than the others.
    """
    at_once([functools.partial(passes.run_pass, job, method, brief=True) for job, method in work])
    for job, method in work:
        passes.run_pass(job, method)


def begin(job: Job, method: Method | None):
    """The state before the first round of the first batch."""
    drafter, params = passes.drafter_and_params(job, method)
    return passes.begin(job, drafter, params, *next(passes.batches(job)))


def median_rate(runs: Sequence[Pass]) -> float:
    """Tokens per second of the decode loop."""
    return statistics.median(p.tokens / p.loop for p in runs)


# Sections ---------------------------------------------------------------------------------------


def bandwidth(size: Scale) -> list[dict]:
    """Reads and writes a large array."""
    iterations, x = 10, jnp.zeros((size.copy,), jnp.bfloat16)
    loop = repeat(lambda iteration, x: x + iteration.astype(x.dtype), iterations, x)
    seconds = statistics.median(clock({"copy": (loop, iterations)}, SAMPLES)["copy"])
    return [{"bytes": 2 * x.nbytes, "seconds": seconds, "bytes_per_second": 2 * x.nbytes / seconds}]


def autoregressive(name: str, size: Scale, params: dict) -> list[dict]:
    """Plain decoding: the compiled loop alone, and with prefill and the host."""
    jobs = [make_job(size.models[name], params, batch, size) for batch in size.batches]
    warm([(job, None) for job in jobs])
    return [
        plain_row(job, size.models[name])
        | {"pass_alone_ms": 1e3 * measuring.time_of_verify(job, None, 1)}
        for job in jobs
    ]


def after_context(name: str, size: Scale, params: dict, batch: int, context: int) -> dict:
    """Plain decoding after prompts of ``context`` tokens."""
    size = size._replace(prompt=context, passes=min(2, size.passes))
    job = make_job(size.models[name], params, batch, size)
    warm([(job, None)])
    return plain_row(job, size.models[name])


def plain_row(job: Job, config: TransformerConfig) -> dict:
    """Measures plain decoding; ``context`` is the mean length of the cached text."""
    runs = [passes.run_pass(job, None) for _ in range(job.repeats)]
    rates = [p.tokens / p.loop for p in runs]
    context = mean_context(job)
    return {
        "batch_size": job.batch_size,
        "context": context,
        "tokens_per_second": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "with_prefill": statistics.median(p.tokens / max(p.walls) for p in runs),
        "step_ms": 1e3 * statistics.median(p.loop / p.loops for p in runs),
        "bytes_per_step": bytes_per_step(config, job.params, job.batch_size, context),
    }


def mean_context(job: Job) -> float:
    """Cached tokens of a row in the middle of decoding."""
    return job.width + job.max_new_tokens / 2


def verify(name: str, size: Scale, params: dict) -> list[dict]:
    """Target passes over chains and binary trees of several sizes."""
    rows, iterations = [], 10
    for batch in size.batches:
        job = make_job(size.models[name], params, batch, size)
        state = begin(job, None)
        loops: dict[Any, tuple[Loop, int]] = {}
        for n in size.sizes:
            chain = forward(job.target, params, state, n, None, iterations)
            loops["chain", n] = chain, iterations
            if n in size.trees:
                parents = (jnp.arange(n, dtype=jnp.int32) - 1) // 2
                parents = jnp.broadcast_to(parents, (batch, n)).at[:, 0].set(-1)
                tree = forward(job.target, params, state, n, layout(parents), iterations)
                loops["tree", n] = tree, iterations
        at_once([loop for loop, _ in loops.values()])
        median = {key: statistics.median(each) for key, each in clock(loops, SAMPLES).items()}
        for (shape, n), seconds in median.items():
            rows.append(
                {
                    "batch_size": batch,
                    "shape": shape,
                    "tokens": n,
                    "ms": 1e3 * seconds,
                    "relative": seconds / median["chain", 1],
                }
            )
    return rows


def controlled(name: str, size: Scale, params: dict) -> Iterator[dict]:
    """All rates: the middle draft length with both batches, then the others with the smaller."""
    method = speculation(name, size, params)
    plan = [(batch, size.middle_gamma) for batch in size.batches]
    plan += [(size.batches[0], gamma) for gamma in size.gammas if gamma != size.middle_gamma]
    jobs = {batch: make_job(size.models[name], params, batch, size) for batch in size.batches}
    first = [(jobs[batch], method(gamma, size.rates[0])) for batch, gamma in plan]
    warm([*((job, None) for job in jobs.values()), *first])
    for batch, gamma in plan:
        yield from rounds(jobs[batch], [method(gamma, rate) for rate in size.rates], size.rates)


def buffers(name: str, size: Scale, params: dict) -> list[dict]:
    """One draft length and one rate, with the XLA flags of this process."""
    job = make_job(size.models[name], params, size.batches[0], size)
    one = speculation(name, size, params)(size.middle_gamma, size.rates[-1])
    warm([(job, None), (job, one)])
    return rounds(job, [one], size.rates[-1:])


# Speculation with controlled acceptance ---------------------------------------------------------


def speculation(name: str, size: Scale, params: dict) -> Callable[[int, float], Method]:
    """(gamma, rate) -> a method: a draft model runs, and ``controlled`` replaces its tokens."""
    config, shape = size.models[name], draft_shape(name, size.models)
    draft_params = weights(shape, 1)
    target, model = (lm.from_config(c, jnp.dtype(jnp.bfloat16)) for c in (config, shape))

    @functools.cache
    def drafter(gamma: int):
        inner = drafters.make("draft_model", target, model=model, params=draft_params, gamma=gamma)
        return drafters.make("controlled", target, drafters=[inner])

    @functools.cache
    def init_params(gamma: int) -> dict:
        return drafter(gamma).init_params(jax.random.key(0))

    def method(gamma: int, rate: float) -> Method:
        # The rate is a parameter, so all rates run the same program.
        own = init_params(gamma) | {"rate": jnp.asarray(rate, jnp.float32)}
        label = f"gamma {gamma}, rate {rate}"
        return Method(label, drafter(gamma), accept.load("chain"), ModelParams(params, own))

    return method


def time_of_accept(job: Job, method: Method) -> float:
    """Seconds of the second half of a round: verdict, cut, commit, the drafter's update.

    The text does not grow.
    """
    state = begin(job, method)
    batch, nodes, iterations = job.batch_size, method.drafter.nodes, 20
    draft = Draft(jnp.ones((batch, nodes), jnp.int32), jnp.ones((batch, nodes), bool))
    shapes = jax.eval_shape(
        job.target.apply, job.params, jnp.zeros((batch, nodes + 1), jnp.int32), state.cache
    )
    scored = step.Scored(*jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes))

    def body(_, state, params, length, draft, scored: step.Scored):
        now = state.replace(
            length=length,
            done=jnp.zeros_like(state.done),
            cache=state.cache.replace(length=length - 1),
        )
        draft, scored = tie(state.tokens, draft, scored)
        keys = rng.RowKeys(now.keys, now.round, now.length)
        fixed = step.Round(job.target, method.drafter, method.accept, keys)
        return step.decide(fixed, params, now, draft, scored)[0]

    loop = repeat(body, iterations, state, method.params, state.length, draft, scored)
    return statistics.median(clock({"accept": (loop, iterations)}, SAMPLES)["accept"])


def rounds(job: Job, methods: Sequence[Method], rates: Sequence[float]) -> list[dict]:
    """A row per method, interleaved with plain decoding; the methods differ only in the rate."""
    plain, runs = [], [[] for _ in methods]
    for _ in range(job.repeats):
        plain.append(passes.run_pass(job, None))
        for own, method in zip(runs, methods, strict=True):
            own.append(passes.run_pass(job, method))
    one = methods[0]
    cost = {
        "step": measuring.time_of_verify(job, None, 1),
        "draft": measuring.time_of_draft(job, one),
        "verify": measuring.time_of_verify(job, one, one.drafter.nodes + 1),
        "accept": time_of_accept(job, one),
    }
    return [
        _row(job, one.drafter.nodes, rate, own, plain, cost)
        for rate, own in zip(rates, runs, strict=True)
    ]


def _row(
    job: Job, gamma: int, rate: float, runs: list[Pass], plain: list[Pass], cost: dict[str, float]
) -> dict:
    first, first_plain = runs[0], plain[0]
    gain = (first.tokens / first.loops) / (first_plain.tokens / first_plain.loops)
    predicted = theory.speedup(gain, cost["draft"], cost["verify"], cost["step"])
    whole = statistics.median(p.loop / p.loops for p in runs)
    speedup = median_rate(runs) / median_rate(plain)
    pairs = zip(first.outputs, first_plain.outputs, strict=True)
    tokens, count = (sum(getattr(c, name) for c in first.counts) for name in ("tokens", "rounds"))
    return {
        "batch_size": job.batch_size,
        "context": mean_context(job),
        "gamma": gamma,
        "rate": rate,
        "block_efficiency": tokens / count,
        "identical": sum(a == b for a, b in pairs),
        "tokens_per_second": median_rate(runs),
        "speedup": speedup,
        "predicted_speedup": predicted,
        "system_efficiency": speedup / predicted,
        "costs_ms": {part: 1e3 * seconds for part, seconds in cost.items()},
        "round_ms": 1e3 * whole,
        "gap_ms": 1e3 * (whole - cost["draft"] - cost["verify"] - cost["accept"]),
    }
