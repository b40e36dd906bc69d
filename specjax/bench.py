"""Measures methods against plain decoding: the same model, precision, prompts and batch, in turns, in one process.

A round of measurement runs plain decoding and then every method over all prompts; there are several rounds and the median
counts. Only the decode loop is timed: prefill, compilation and transfers are outside, for both sides. Time splits come from
loops that only draft or only verify.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, metrics, rng, sampling, theory
from specjax.drafters import none
from specjax.rng import RowKeys
from specjax.types import LM, Accept, Context, DecodeState, Drafter, ModelParams


class Method(NamedTuple):
    """One thing to measure."""

    name: str
    drafter: Drafter
    accept: Accept
    params: ModelParams
    warm: bool = False  # whether it learns from other prompts before it is measured


class Job(NamedTuple):
    """What all methods are measured on."""

    target: LM
    params: Any
    prompts: Sequence[Sequence[int]]
    settings: dict  # of sampling.make_sampling
    batch_size: int
    max_new_tokens: int
    eos_id: tuple[int, ...]
    seed: int
    repeats: int


class Pass(NamedTuple):
    """One run over all prompts."""

    seconds: float
    outputs: list[list[int]]
    counts: metrics.Counts | None
    loops: int  # times the compiled loop went round


def batches(job: Job) -> Iterator[tuple[list[int], list[list[int]]]]:
    """(row numbers, prompts) of each batch; the last is filled up with rows that are finished from the start (-1)."""
    for start in range(0, len(job.prompts), job.batch_size):
        rows = list(range(start, min(start + job.batch_size, len(job.prompts))))
        rows += [-1] * (job.batch_size - len(rows))
        yield rows, [list(job.prompts[max(r, 0)]) for r in rows]


def begin(job: Job, drafter: Drafter, params: ModelParams, rows, prompts, *, finished: bool = False) -> DecodeState:
    """The state before the first round. ``finished`` stops every row at once: such a state only compiles a loop."""
    width = max(map(len, job.prompts))
    packed, lengths = decode.pack_prompts(prompts, width)
    new = np.where(np.asarray(rows) < 0, 0, 0 if finished else job.max_new_tokens)
    keys = rng.row_keys(job.seed, [r if r >= 0 else len(job.prompts) for r in rows])
    return decode.prefill(
        job.target,
        drafter,
        params,
        packed,
        lengths,
        keys,
        max_len=width + job.max_new_tokens,
        limit=lengths + jnp.asarray(new, jnp.int32),
        sampling=sampling.make_sampling(len(rows), **job.settings),
    )


def run_pass(job: Job, method: Method | None, *, finished: bool = False) -> Pass:
    """Decodes all prompts with ``method``, or plainly if it is None. Raises NonFiniteLogits."""
    drafter = none.make(job.target) if method is None else method.drafter
    params = ModelParams(job.params) if method is None else method.params
    seconds, outputs, counts, loops = 0.0, [], None, 0
    for rows, prompts in batches(job):
        state = jax.block_until_ready(begin(job, drafter, params, rows, prompts, finished=finished))
        began = time.perf_counter()
        if method is None:
            records = None
            state = decode.autoregressive(job.target, params, state, max_steps=job.max_new_tokens, eos_id=job.eos_id)
        else:
            state, records = decode.generate(
                job.target, drafter, method.accept, params, state, max_steps=job.max_new_tokens, eos_id=job.eos_id
            )
        jax.block_until_ready(state.tokens)
        seconds += time.perf_counter() - began
        decode.check(state)
        real = [r >= 0 for r in rows]
        outputs += [o for o, r in zip(decode.outputs(state, [len(p) for p in prompts]), real, strict=True) if r]
        if records is None:
            loops += max(map(len, decode.outputs(state, [len(p) for p in prompts])))
        else:
            now = metrics.count(records, real, drafter.longest)
            counts = now if counts is None else counts.plus(now)
            loops += int(np.asarray(records.emitted).any(1).sum())
        if finished:
            break  # one batch compiles everything
    return Pass(seconds, outputs, counts, loops)


def teach(job: Job, method: Method, prompts: Sequence[Sequence[int]]) -> Method:
    """The method after decoding other prompts and learning from them, if it is one that does: untimed, and then it stays as
    it is, so that no measured prompt profits from another and their order does not matter."""
    learn = method.drafter.learn
    if not method.warm or learn is None:
        return method
    # Noise that no measured pass uses.
    lesson = job._replace(prompts=prompts, seed=job.seed + job.repeats)
    for rows, ids in batches(lesson):
        state = begin(lesson, method.drafter, method.params, rows, ids)
        state, _ = decode.generate(
            job.target,
            method.drafter,
            method.accept,
            method.params,
            state,
            max_steps=job.max_new_tokens,
            eos_id=job.eos_id,
        )
        decode.check(state)
        method = method._replace(
            params=method.params._replace(draft=learn(method.params, state, [len(i) for i in ids]))
        )
    return method


def warm(jobs: Sequence[Job], methods: Sequence[Method], also: Sequence[Callable[[], object]] = ()) -> None:
    """Compiles every program that ``measure`` runs for these batch sizes, several at once: most of a short bench."""
    work: list[Callable[[], object]] = list(also)
    for job in {job.batch_size: job for job in jobs}.values():
        work.append(functools.partial(time_of_verify, job, None, 1, samples=1))
        for method in (None, *methods):
            work.append(functools.partial(run_pass, job, method, finished=True))
            if method is not None and method.drafter.nodes:
                work.append(functools.partial(time_of_draft, job, method, samples=1))
                work.append(functools.partial(time_of_verify, job, method, method.drafter.nodes + 1, samples=1))
    if job := next((job for job in jobs if job.settings["temperature"] > 0), None):
        full = [[0] * job.max_new_tokens] * len(job.prompts)
        for m in methods:
            work.append(
                functools.partial(metrics.law_check, job.target, m.params, job.prompts, full, job.settings, m.drafter)
            )
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(task) for task in work]:
            done.result()


def measure(job: Job, methods: Sequence[Method], say: Callable[[str], None] = lambda _: None) -> list[dict]:
    """Rows of results.json for the methods under the job's settings, ``job.repeats`` passes each, interleaved.

    Call ``warm`` first, or the first pass compiles.
    """
    passes: dict[str | None, list[Pass]] = {m: [] for m in (None, *(m.name for m in methods))}
    for turn in range(job.repeats):
        for method in (None, *methods):
            name = None if method is None else method.name
            say(f"{name or 'autoregressive'}, pass {turn + 1} of {job.repeats}")
            # Another seed each time: more text to judge sampled output by.
            passes[name].append(run_pass(job._replace(seed=job.seed + turn), method))
    step = time_of_verify(job, None, 1)
    rows = []
    for method in methods:
        say(f"{method.name}: time split and losslessness")
        runs = passes[method.name]
        rows.append(_row(job, method, runs, passes[None], step))
    return rows


def _rate(passes: Sequence[Pass]) -> float:
    return statistics.median(sum(map(len, p.outputs)) / p.seconds for p in passes)


def _row(job: Job, method: Method, runs: list[Pass], plain: list[Pass], step: float) -> dict:
    counts = runs[0].counts
    assert counts is not None
    rate, plain_rate = _rate(runs), _rate(plain)
    temperature = float(job.settings["temperature"])
    if temperature == 0:
        lossless = metrics.greedy_identity(plain[0].outputs, runs[0].outputs)
    else:
        outputs = [o for run in runs for o in run.outputs]
        prompts = list(job.prompts) * len(runs)
        lossless = metrics.law_check(job.target, method.params, prompts, outputs, job.settings, method.drafter)
    summary = metrics.summary(counts)
    predicted, split = None, None
    if method.drafter.nodes:
        draft, verify = time_of_draft(job, method), time_of_verify(job, method, method.drafter.nodes + 1)
        # Tokens per turn of the loop, not per round of a row: a batch goes on until its slowest row is done, in both loops.
        gain = (counts.tokens / runs[0].loops) / (sum(map(len, plain[0].outputs)) / plain[0].loops)
        predicted = theory.speedup(gain, draft, verify, step)
        # A turn's whole time, from the loop itself; what drafting and verifying leave is acceptance and bookkeeping.
        whole = statistics.median(p.seconds / p.loops for p in runs)
        accept = max(whole - draft - verify, 0.0)
        total = draft + verify + accept
        split = {"draft": draft / total, "verify": verify / total, "accept": accept / total}
    return {
        "method": method.name,
        "accept": method.accept.name,
        "class": method.accept.law,
        "temperature": temperature,
        "batch_size": job.batch_size,
        "prompts": len(job.prompts),
        **summary,
        "tokens_per_second": rate,
        "autoregressive_tokens_per_second": plain_rate,
        "speedup": rate / plain_rate,
        "predicted_speedup": predicted,
        "time_split": split,
        "lossless": lossless._asdict(),
        "category": None,
        "warm": method.warm,
    }


# Time splits. Each loop depends on its own results, so that the compiler can neither hoist nor drop the work.

_TURNS = 10


def time_of_verify(job: Job, method: Method | None, size: int, samples: int = 5) -> float:
    """Seconds of one target pass over ``size`` tokens per row, in the buffers of that method (None: of plain decoding)."""
    return _clock(job, method, lambda p, s: _verify_loop(job.target, size, p.target, s.tokens, s.cache), samples)


def time_of_draft(job: Job, method: Method, samples: int = 5) -> float:
    """Seconds of one call of the drafter's ``propose``."""
    return _clock(job, method, functools.partial(_draft_loop, method.drafter), samples)


def _clock(job: Job, method: Method | None, loop: Callable, count: int) -> float:
    drafter = none.make(job.target) if method is None else method.drafter
    params = ModelParams(job.params) if method is None else method.params
    rows, prompts = next(batches(job))
    state = begin(job, drafter, params, rows, prompts)
    jax.block_until_ready(loop(params, state))
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        jax.block_until_ready(loop(params, state))
        samples.append(time.perf_counter() - began)
    return statistics.median(samples) / _TURNS


@functools.partial(jax.jit, static_argnums=(0, 1))
def _verify_loop(target: LM, size: int, params, tokens: jax.Array, cache):
    tokens = jnp.broadcast_to(tokens[:, :1], (tokens.shape[0], size))

    def turn(_, carry):
        tokens, cache = carry
        out, cache = target.apply(params, tokens, cache)
        return sampling.argmax(out.logits), cache

    return jax.lax.fori_loop(0, _TURNS, turn, (tokens, cache))[0]


@functools.partial(jax.jit, static_argnums=0)
def _draft_loop(drafter: Drafter, params: ModelParams, state: DecodeState):
    def turn(index, carry):
        tokens, inner = carry
        keys = RowKeys(state.keys, state.round + index, state.length)
        draft, inner = drafter.propose(params, keys, Context(tokens, state.length, state.sampling), inner)
        never = jnp.where(draft.tokens.sum() == -7, 1, 0)  # ties each turn to the last one
        return tokens + never, inner

    return jax.lax.fori_loop(0, _TURNS, turn, (state.tokens, state.draft))[0]
